"""What a server lists, by number or by name, as a table in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, overload


class Row(Protocol):
    """One of what a server lists."""

    @property
    def name(self) -> str:
        """What it is called."""

    def list_cells(self) -> tuple[str, ...]:
        """It as a row of a table."""


T = TypeVar("T", bound=Row)


@dataclass(frozen=True, repr=False)
class Listing(Sequence[T]):
    """Entries in the server's order; KeyError for a name that none of them has."""

    headers: ClassVar[tuple[str, ...]]
    entries: tuple[T, ...]

    @overload
    def __getitem__(self, key: int | str) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[T]: ...
    def __getitem__(self, key: int | str | slice) -> T | Sequence[T]:
        if not isinstance(key, str):
            return self.entries[key]
        for entry in self.entries:
            if entry.name == key:
                return entry
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return align([self.headers, *(entry.list_cells() for entry in self.entries)])


def align(rows: Sequence[Sequence[str]]) -> str:
    """Texts in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
