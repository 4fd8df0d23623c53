"""What waits: by priority, in order of arrival, and which of it comes first."""

from __future__ import annotations

from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from layertap.service.engine.schedule.batch import DecodeTask, QueuedRequest, RowSlice
from layertap.service.types import Priority

MAX_NUM_CANDIDATES = 128  # requests of each priority that a batch is chosen from: the oldest ones
EntryT = TypeVar("EntryT", QueuedRequest, DecodeTask)


class Urgency(NamedTuple):
    """Sorts what waits: interactive before bulk, then by arrival.

    ``due_at``: the arrival, and of bulk some seconds later; from that moment on it counts as interactive that came
    just then. ``deferred``: bulk before that moment.
    """

    deferred: bool
    due_at: float


def get_urgency(entry: QueuedRequest | DecodeTask, now: float) -> Urgency:
    """How urgent something is at a moment; the least is the most urgent."""
    return Urgency(entry.priority == "bulk" and now < entry.due_at, entry.due_at)


class WaitingEntries(Generic[EntryT]):
    """What waits for the same thing."""

    def __init__(self) -> None:
        self._entries: dict[Priority, dict[EntryT, None]] = {"interactive": {}, "bulk": {}}  # in order of arrival

    def __bool__(self) -> bool:
        return any(self._entries.values())

    def __contains__(self, entry: EntryT) -> bool:
        return entry in self._entries[entry.priority]

    def add(self, entry: EntryT) -> None:
        """Append an entry."""
        self._entries[entry.priority][entry] = None

    def remove(self, entry: EntryT) -> None:
        """Forget an entry; nothing happens where it does not wait."""
        self._entries[entry.priority].pop(entry, None)

    def find_first(self, now: float) -> EntryT | None:
        """The most urgent entry."""
        oldest = [next(iter(entries)) for entries in self._entries.values() if entries]
        return min(oldest, key=lambda entry: get_urgency(entry, now), default=None)


class WaitingRequests(WaitingEntries[QueuedRequest]):
    """The requests of a ``BatchKey`` that have rows in no batch yet; ``rows`` counts these.

    What is past its deadline is dropped by whoever meets it, ``first`` or ``candidates``; until then it is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def add(self, entry: QueuedRequest) -> None:
        """Append a request."""
        super().add(entry)
        self.rows += entry.waiting_rows

    def remove(self, entry: QueuedRequest) -> None:
        """Forget a request; no row of it waits any more."""
        if entry in self:
            super().remove(entry)
            self.rows -= entry.waiting_rows
            entry.taken_rows = entry.rows

    def take(self, row_slice: RowSlice) -> None:
        """Count rows as given to a batch; a request without further rows is forgotten."""
        self.rows -= row_slice.rows
        row_slice.request.taken_rows = row_slice.stop
        if row_slice.request.waiting_rows == 0:
            self.remove(row_slice.request)

    def find_first(self, now: float) -> QueuedRequest | None:
        """The most urgent request that is not past its deadline."""
        for requests in self._entries.values():
            while (oldest := next(iter(requests), None)) is not None and oldest.deadline <= now:
                self.remove(oldest)
        return super().find_first(now)

    def list_candidates(self, now: float) -> list[QueuedRequest]:
        """What the next batch is chosen from, by arrival: deferred bulk only where nothing interactive waits."""
        interactive, bulk = self._list_oldest("interactive", now), self._list_oldest("bulk", now)
        if interactive:
            bulk = [request for request in bulk if not get_urgency(request, now).deferred]
        return sorted([*interactive, *bulk], key=lambda request: request.due_at)

    def _list_oldest(self, priority: Priority, now: float) -> list[QueuedRequest]:
        requests = list(islice(self._entries[priority], MAX_NUM_CANDIDATES))
        for request in [request for request in requests if request.deadline <= now]:
            self.remove(request)
            requests.remove(request)
        return requests
