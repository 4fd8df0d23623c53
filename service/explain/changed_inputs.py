"""Inputs that explanations change: how many there may be, and how long their forwards take."""

from __future__ import annotations

from dataclasses import dataclass

from layertap.models.errors import TooLargeError
from layertap.models.model_info import ModelInfo
from layertap.service.engine.rows.predicted_rows import count_numbers

CHUNK_ROWS = 32  # changed inputs that go the road of any request at once


@dataclass(frozen=True)
class ChangedRows:
    """So many changed inputs of a shape (1, …), of which gradients are taken, or only scores."""

    count: int
    shape: tuple[int, ...]
    has_graph: bool

    def estimate_seconds(self, model: ModelInfo) -> float:
        """Seconds of their forwards, chunk after chunk on one thread, by what was measured at loading; meant low."""
        shapes = (self.shape[1:],)
        surveyed = model.catalogs.get_catalog(shapes)
        catalog = surveyed or model.catalog
        costs = catalog.graph_costs if self.has_graph else catalog.costs
        share = 1.0 if surveyed else min(count_numbers(shapes) / count_numbers(model.shapes), 1.0)
        return self.count * share * costs.estimate_seconds(CHUNK_ROWS) / CHUNK_ROWS


class ChangedInputs:
    """How many changed inputs a request has had of those that it may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def add(self, count: int, rows: int) -> None:
        """Count so many more, of some rows; TooLargeError where that would be too many."""
        total = self._count + count
        if total > self._limit:
            fewer = (
                f"send at most {rows * self._limit // total} inputs at once, or " if rows * self._limit >= total else ""
            )
            raise TooLargeError(
                f"the request would run the model on {total} changed inputs, the limit is {self._limit}",
                hint=f"{fewer}ask for fewer methods, classes, 'steps' or 'samples', or a larger 'stride'",
            )
        self._count = total
