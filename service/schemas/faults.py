"""Errors of single fields and entries, collected as the faults of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from layertap.models.errors import Fault, LayertapError, RequestError

B = TypeVar("B")
T = TypeVar("T")


def read_field(pointer: str, read: Callable[[], T]) -> T:
    """What one field means; RequestError with its pointer."""
    try:
        return read()
    except LayertapError as error:
        raise RequestError.from_faults([error.to_fault(pointer)]) from None


def read_entries(bodies: Iterable[B], name: str, read: Callable[[B], T]) -> tuple[T, ...]:
    """What each entry of a list means; RequestError with a fault for each bad one."""
    entries: list[T] = []
    faults: list[Fault] = []
    for index, body in enumerate(bodies):
        try:
            entries.append(read(body))
        except LayertapError as error:
            faults.append(error.to_fault(f"/{name}/{index}"))
    if faults:
        raise RequestError.from_faults(faults)
    return tuple(entries)
