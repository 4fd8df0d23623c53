"""How the patches of a picture stand: the grid of which a row of tokens is made; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt, prod

Grid = tuple[int, int]  # rows, columns


def list_grids(sizes: Iterable[Grid]) -> dict[int, Grid]:
    """By the number of its positions, the one size that maps of a forward have with as many; none where two differ.

    A transformer's patches come of such a map: of a convolution whose strides are the patches.
    """
    grids: dict[int, set[Grid]] = {}
    for size in sizes:
        grids.setdefault(prod(size), set()).add(size)
    return {count: next(iter(several)) for count, several in grids.items() if len(several) == 1}


def find_grid(tokens: int, known: Grid | None = None) -> Grid | None:
    """The grid of so many patches: as it is known, else a square; None where they make none."""
    if known is not None and prod(known) == tokens:
        return known
    side = isqrt(max(tokens, 0))
    return (side, side) if side and side**2 == tokens else None
