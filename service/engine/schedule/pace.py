"""The speed of one model, by its recent batches."""

from __future__ import annotations

from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.batch import Batch
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.waiting import SMOOTHING


class Pace:
    """The device time of one row of a model, ``seconds_per_row``: a mean of recent batches."""

    def __init__(self, model: ModelInfo, key: BatchKey, replicas: int, parallel: int) -> None:
        """``key``: for the configured shape; ``parallel`` replicas compute side by side."""
        costs = model.catalog.costs
        self._row_seconds = costs.per_row
        self._replicas = replicas
        self._parallel = parallel * min(key.slots, costs.speedup)  # a batch may take several threads
        self._alone = costs.estimate_seconds(1)
        self._batch_seconds = self._alone / self._parallel
        self._decode_seconds = 0.0
        self.seconds_per_row = self._batch_seconds

    def estimate_seconds(self, seconds: float) -> float:
        """Current device time of forwards that took ``seconds`` one by one when the model was loaded."""
        return seconds * self._batch_seconds / self._alone

    def estimate_least_seconds(self, seconds: float) -> float:
        """The faster of the load-time and the recent measurement."""
        return min(self.estimate_seconds(seconds), seconds / self._parallel)

    def add_batch(self, batch: Batch, seconds: float, parallel: int, *, decoded: bool) -> None:
        """Note a batch's duration, which it shared with the other batches in parallel on its device.

        ``decoded``: the duration includes the decoding of its pictures, which is then not counted separately.
        """
        # In rows of the configured shape, because a few large pictures say little about waiting small ones.
        weight = batch.key.costs.per_row / self._row_seconds
        spent = seconds / min(parallel, self._replicas) / batch.rows / weight
        self._batch_seconds += SMOOTHING * (spent - self._batch_seconds)
        if decoded:
            self._decode_seconds -= SMOOTHING * self._decode_seconds
        self.seconds_per_row = self._batch_seconds + self._decode_seconds

    def add_decode(self, seconds: float, rows: int) -> None:
        """Note how long all slots of the CPU took to decode so many rows."""
        if rows:
            self._decode_seconds += SMOOTHING * (seconds / rows - self._decode_seconds)
            self.seconds_per_row = self._batch_seconds + self._decode_seconds
