"""Which model is next: each gets the same time on a device that several want."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.service.engine.schedule.batch import Batch


class FairShare:
    """The seconds of slots that each model has used; the one that used least goes first.

    ``used_seconds`` only compare, they do not add up to the time since a start: a model that wants its device anew
    begins where those stand that kept it busy meanwhile, so that it neither saves up time nor pays for time that
    nobody else wanted. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a batch's expected
    seconds at its start and what it took in truth at its end.
    """

    def __init__(self) -> None:
        self.used_seconds: dict[str, float] = {}
        self._device_seconds: dict[str, float] = {}  # the most that a model had used when a batch of it started there

    def join(self, model: str, devices: Sequence[str]) -> None:
        """Let a model of which nothing waits or runs begin on its devices: where the least busy one stands."""
        device_seconds = min(self._device_seconds.get(device, 0.0) for device in devices)
        self.used_seconds[model] = max(self.used_seconds.get(model, 0.0), device_seconds)

    def charge(self, batch: Batch) -> None:
        """Count the seconds that a batch should take on its slots."""
        model, device = batch.key.model, batch.device
        self._device_seconds[device] = max(self._device_seconds.get(device, 0.0), self.used_seconds[model])
        self.used_seconds[model] += batch.seconds * batch.slots

    def recharge(self, batch: Batch, extended: Batch) -> None:
        """Count a batch that has more rows by now as what it is."""
        self.used_seconds[batch.key.model] += extended.seconds * extended.slots - batch.seconds * batch.slots

    def correct(self, batch: Batch, seconds: float) -> None:
        """Count the seconds that a batch has taken instead of those it should have."""
        self.used_seconds[batch.key.model] += (seconds - batch.seconds) * batch.slots

    def remove(self, model: str) -> None:
        """Forget a model."""
        self.used_seconds.pop(model, None)
