"""How quick a model is: what its rows take, measured when it was loaded and from batch to batch."""

from __future__ import annotations

from layertap.models.model_info import ModelInfo
from layertap.service.engine.batch import SMOOTHING, Batch, BatchKey


class Pace:
    """What a row of one model takes the device: a mean of recent batches."""

    def __init__(self, model: ModelInfo, key: BatchKey, replicas: int, parallel: int) -> None:
        """``key`` is that of the configured shape; ``parallel`` replicas compute side by side."""
        costs = model.catalog.costs
        self._model = model
        self._replicas = replicas
        self._parallel = parallel * min(key.slots, costs.speedup)  # a batch may take several threads
        self._alone = costs.estimate_seconds(1)
        self._batch_seconds = self._alone / self._parallel
        self._decode_seconds = 0.0

    @property
    def seconds_per_row(self) -> float:
        """Seconds that a row takes the device."""
        return self._batch_seconds + self._decode_seconds

    def estimate_seconds(self, seconds: float) -> float:
        """What forwards take the device now that took so many seconds one by one when the model was loaded."""
        return seconds * self._batch_seconds / self._alone

    def estimate_least_seconds(self, seconds: float) -> float:
        """The faster of the load-time and the recent measurement."""
        return min(self.estimate_seconds(seconds), seconds / self._parallel)

    def add_batch(self, batch: Batch, seconds: float, parallel: int, *, decoded: bool) -> None:
        """Note how long a batch took, beside as many others as the device computes at the same time.

        ``decoded``: decoding its pictures was a part of it, and took no time before.
        """
        # In rows of the configured shape: a few large pictures say nothing of the small ones that wait.
        weight = batch.key.costs.per_row / self._model.catalog.costs.per_row
        spent = seconds / min(parallel, self._replicas) / batch.rows / weight
        self._batch_seconds += SMOOTHING * (spent - self._batch_seconds)
        if decoded:
            self.add_decode(0.0, batch.rows)

    def add_decode(self, seconds: float, rows: int) -> None:
        """Note how long all slots of the CPU took to decode so many rows."""
        if rows:
            self._decode_seconds += SMOOTHING * (seconds / rows - self._decode_seconds)
