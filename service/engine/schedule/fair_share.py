"""Fair shares: models that want the same device get the same time on it."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.service.engine.batch import Batch


class FairShare:
    """The slot seconds that each model has used; the model that used least goes first.

    ``used_seconds`` are for comparison, not totals: a model that was idle begins at the level of the models that kept
    its device busy meanwhile, so that it neither saves up time nor pays for time that no other model wanted. This is
    start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a batch's expected seconds when it starts and
    its measured ones when it ends.
    """

    def __init__(self) -> None:
        self.used_seconds: dict[str, float] = {}
        self._device_seconds: dict[str, float] = {}  # the most that a model had used when it started a batch

    def join(self, model: str, devices: Sequence[str]) -> None:
        """Begin to count a model of which nothing waits or runs, at the level of its least used device."""
        device_seconds = min(self._device_seconds.get(device, 0.0) for device in devices)
        self.used_seconds[model] = max(self.used_seconds.get(model, 0.0), device_seconds)

    def charge(self, batch: Batch) -> None:
        """Add the expected seconds of a batch that starts."""
        model, device = batch.key.model, batch.device
        self._device_seconds[device] = max(self._device_seconds.get(device, 0.0), self.used_seconds[model])
        self.used_seconds[model] += batch.seconds * batch.slots

    def recharge(self, batch: Batch, extended: Batch) -> None:
        """Add what a batch that took in more rows is expected to take longer."""
        self.used_seconds[batch.key.model] += extended.seconds * extended.slots - batch.seconds * batch.slots

    def correct(self, batch: Batch, seconds: float) -> None:
        """Replace the expected seconds of a batch by the measured ones."""
        self.used_seconds[batch.key.model] += (seconds - batch.seconds) * batch.slots

    def remove(self, model: str) -> None:
        """Forget a model."""
        self.used_seconds.pop(model, None)
