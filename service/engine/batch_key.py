"""Which rows may share a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layertap.models.catalog.catalog import Costs

MIN_EFFICIENT_ROWS = 4  # of an efficient forward, even if its fixed cost is zero
MIN_EFFICIENT_S = 0.025  # of an efficient forward, as far as ``max_rows`` allows: a batch costs more than its forward
MAX_FIXED_COST_RATIO = 0.1  # in an efficient forward: a row's share of the fixed cost, divided by the row's own cost
MIN_PARALLEL_ROWS = 2  # of a forward that should not run as a single row, which may take all slots


@dataclass(eq=False)
class BatchKey:
    """Rows with the same key may share a forward: they have one shape and run through one model.

    ``model`` identifies one loaded version of a model; ``name`` is its name, which two loaded versions may share.
    ``devices``: the devices that hold the model, each once; a forward runs on one of them. ``max_rows``: the most rows
    of a forward, by settings and by the memory that was free at loading. ``max_bytes``: the limit for a forward's
    values and its captures. ``pads``: every forward is padded to ``padded_rows``, the most that fit. ``slots``: how
    many slots a batch of several rows takes. ``replicas``: how many batches the model runs at once on one device.
    ``efficient_rows``: the number of rows beyond which a forward hardly gets cheaper per row.
    """

    model: str
    devices: tuple[str, ...]
    costs: Costs
    max_rows: int
    max_bytes: int = 2**62
    pads: bool = False
    slots: int = 1
    replicas: int = 2**62
    name: str = ""
    padded_rows: int | None = field(init=False)
    efficient_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.padded_rows = self.max_rows if self.pads else None
        by_cost = math.ceil(self.costs.base / (MAX_FIXED_COST_RATIO * self.costs.per_row))
        rows = max(by_cost, MIN_EFFICIENT_ROWS, int(MIN_EFFICIENT_S / self.costs.per_row))
        self.efficient_rows = self.max_rows if self.pads else min(rows, self.max_rows)

    def count_few_rows(self, padded_rows: int | None) -> float:
        """So many rows are quicker one after the other, each on all slots, than in parallel; 0: not even one."""
        return MIN_PARALLEL_ROWS * self.costs.speedup if self.costs.speedup > 1 and padded_rows in (None, 1) else 0.0
