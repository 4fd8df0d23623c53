"""What waits, by priority and by when it is due, and which of it comes first."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from layertap.service.engine.schedule.batch import DecodeTask, QueuedRequest, RowSlice
from layertap.service.types import Priority

MAX_NUM_CANDIDATES = 128  # requests of each priority that a batch is chosen from: the first ones
EntryT = TypeVar("EntryT", QueuedRequest, DecodeTask)


class Urgency(NamedTuple):
    """Sorts what waits: interactive before bulk, then by when it is due.

    ``due_at``: the arrival, of bulk some seconds later, and later again after each part of a request that has run.
    From that moment on bulk counts as interactive that came just then; before it is ``deferred``.
    """

    deferred: bool
    due_at: float


def get_urgency(entry: QueuedRequest | DecodeTask, now: float) -> Urgency:
    """How urgent something is at a moment; the least is the most urgent."""
    return Urgency(entry.priority == "bulk" and now < entry.due_at, entry.due_at)


class WaitingEntries(Generic[EntryT]):
    """What waits for the same thing."""

    def __init__(self) -> None:
        self._entries: dict[Priority, list[EntryT]] = {"interactive": [], "bulk": []}  # each sorted by ``due_at``

    def __bool__(self) -> bool:
        return any(self._entries.values())

    def add(self, entry: EntryT) -> None:
        """Let an entry wait, behind all that are due as soon."""
        insort(self._entries[entry.priority], entry, key=attrgetter("due_at"))

    def remove(self, entry: EntryT) -> bool:
        """Forget an entry; whether it was there."""
        entries = self._entries[entry.priority]
        start = bisect_left(entries, entry.due_at, key=attrgetter("due_at"))
        for place in range(start, len(entries)):
            if entries[place] is entry:
                del entries[place]
                return True
            if entries[place].due_at != entry.due_at:
                break
        return False

    def find_first(self, now: float) -> EntryT | None:
        """The most urgent entry."""
        first = [entries[0] for entries in self._entries.values() if entries]
        return min(first, key=lambda entry: get_urgency(entry, now), default=None)


class WaitingRequests(WaitingEntries[QueuedRequest]):
    """The requests of a ``BatchKey`` that have rows in no batch yet; ``rows`` counts these.

    Requests past their deadline are dropped by ``find_first`` and ``list_candidates``; until then they are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def add(self, entry: QueuedRequest) -> None:
        """Let the rows of a request wait that are in no batch yet."""
        super().add(entry)
        self.rows += entry.waiting_rows

    def remove(self, entry: QueuedRequest) -> bool:
        """Forget a request: no row of it waits any more; whether it was there."""
        found = super().remove(entry)
        if found:
            self.rows -= entry.waiting_rows
            entry.taken_rows = entry.rows
        return found

    def take(self, row_slice: RowSlice, due_at: float) -> None:
        """Give rows to a batch; what is left of their request is due at a moment."""
        request = row_slice.request
        self.rows -= row_slice.rows
        request.taken_rows = row_slice.stop
        if request.waiting_rows == 0:
            super().remove(request)
        elif due_at != request.due_at:
            super().remove(request)
            request.due_at = due_at
            super().add(request)

    def find_first(self, now: float) -> QueuedRequest | None:
        """The most urgent request that is not past its deadline."""
        for requests in self._entries.values():
            while requests and requests[0].deadline <= now:
                self.remove(requests[0])
        return super().find_first(now)

    def list_candidates(self, now: float) -> list[QueuedRequest]:
        """What the next batch is chosen from, sorted: deferred bulk only where nothing interactive waits."""
        interactive, bulk = self._list_first("interactive", now), self._list_first("bulk", now)
        if interactive:
            bulk = [request for request in bulk if not get_urgency(request, now).deferred]
        return sorted([*interactive, *bulk], key=lambda request: request.due_at)

    def _list_first(self, priority: Priority, now: float) -> list[QueuedRequest]:
        requests = self._entries[priority][:MAX_NUM_CANDIDATES]
        for request in [request for request in requests if request.deadline <= now]:
            self.remove(request)
            requests.remove(request)
        return requests
