"""When work is worth a thread: what takes less time than the way to a thread and back is done at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from layertap.service.engine.deadline import RunInThread

T = TypeVar("T")


def is_short(
    *,
    results: int = 0,
    counted_numbers: int = 0,
    checked_numbers: int = 0,
    written_numbers: int = 0,
    parsed_bytes: int = 0,
    copied_bytes: int = 0,
    tokenized_characters: int = 0,
) -> bool:
    """Whether work takes less than about half a millisecond, by what it has to do.

    ``results``: named arrays to go through. ``counted_numbers`` are summed or searched, ``checked_numbers`` compared
    with a bound, ``written_numbers`` become text. ``parsed_bytes`` of JSON; ``copied_bytes`` of tensors or pictures;
    ``tokenized_characters`` by a quick tokenizer.
    """
    return (
        results <= 64
        and counted_numbers <= 2**16
        and checked_numbers <= 2**17
        and written_numbers <= 2**12
        and parsed_bytes <= 2**11
        and copied_bytes <= 2**20
        and tokenized_characters <= 2**11
    )


async def run_if_long(run_in_thread: RunInThread, function: Callable[[], T], deadline: float, **amounts: int) -> T:
    """The result of a CPU-bound function, called at once if its work ``is_short``, else in a thread; DeadlineError."""
    return function() if is_short(**amounts) else await run_in_thread(function, deadline)
