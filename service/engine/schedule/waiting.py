"""Waiting jobs and pictures, sorted by priority and by when they are due."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from layertap.service.engine.batch import Job, RowSlice
from layertap.service.types import Priority

MAX_NUM_CANDIDATES = 128  # a batch is chosen from the first so many jobs of each priority


@dataclass(eq=False)
class DecodeTask:
    """Items of a job that wait to be decoded; the batcher sets the times."""

    priority: Priority = "interactive"
    enqueued_at: float = 0.0
    due_at: float = 0.0


EntryT = TypeVar("EntryT", Job, DecodeTask)


def is_deferred(entry: Job | DecodeTask, now: float) -> bool:
    """Whether an entry is bulk, and not due yet; from then on it counts as interactive."""
    return entry.priority == "bulk" and now < entry.due_at


class WaitingEntries(Generic[EntryT]):
    """Entries that wait for the same thing, sorted: deferred ones last, then by due time.

    An entry is due at the time of its arrival; bulk some seconds later; the rest of a large job later after each of its
    batches.
    """

    def __init__(self) -> None:
        self._entries: dict[Priority, list[EntryT]] = {"interactive": [], "bulk": []}  # each sorted by ``due_at``

    def __bool__(self) -> bool:
        return any(self._entries.values())

    def add(self, entry: EntryT) -> None:
        """Add an entry, behind all that are due at the same time."""
        insort(self._entries[entry.priority], entry, key=attrgetter("due_at"))

    def remove(self, entry: EntryT) -> bool:
        """Remove an entry; return whether it was waiting."""
        entries, due_at = self._entries[entry.priority], attrgetter("due_at")
        start, stop = bisect_left(entries, entry.due_at, key=due_at), bisect_right(entries, entry.due_at, key=due_at)
        if entry not in entries[start:stop]:
            return False
        del entries[entries.index(entry, start, stop)]
        return True

    def find_first(self, now: float) -> EntryT | None:
        """The most urgent entry."""
        first = [entries[0] for entries in self._entries.values() if entries]
        return min(first, key=lambda entry: (is_deferred(entry, now), entry.due_at), default=None)


class WaitingJobs(WaitingEntries[Job]):
    """The jobs of a ``BatchKey`` that have rows in no batch yet; ``rows`` counts these.

    Requests past their deadline are dropped by ``find_first`` and ``list_candidates``; until then they are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def add(self, entry: Job) -> None:
        """Add a job with its remaining rows."""
        super().add(entry)
        self.rows += entry.waiting_rows

    def remove(self, entry: Job) -> bool:
        """Remove a job, whose remaining rows then never run; return whether it was waiting."""
        found = super().remove(entry)
        if found:
            self.rows -= entry.waiting_rows
            entry.taken_rows = entry.rows
        return found

    def take(self, row_slice: RowSlice, due_at: float) -> None:
        """Take rows for a batch; the rest of their job is due at ``due_at``."""
        job = row_slice.job
        self.rows -= row_slice.rows
        job.taken_rows = row_slice.stop
        if job.waiting_rows == 0:
            super().remove(job)
        elif due_at != job.due_at:
            super().remove(job)
            job.due_at = due_at
            super().add(job)

    def find_first(self, now: float) -> Job | None:
        """The most urgent job that is not past its deadline."""
        for jobs in self._entries.values():
            while jobs and jobs[0].deadline <= now:
                self.remove(jobs[0])
        return super().find_first(now)

    def list_candidates(self, now: float) -> list[Job]:
        """The jobs to choose the next batch from, sorted; deferred bulk only if nothing interactive waits."""
        interactive, bulk = self._list_first("interactive", now), self._list_first("bulk", now)
        if interactive:
            bulk = [job for job in bulk if not is_deferred(job, now)]
        return sorted([*interactive, *bulk], key=lambda job: job.due_at)

    def _list_first(self, priority: Priority, now: float) -> list[Job]:
        jobs = self._entries[priority][:MAX_NUM_CANDIDATES]
        for job in [job for job in jobs if job.deadline <= now]:
            self.remove(job)
            jobs.remove(job)
        return jobs
