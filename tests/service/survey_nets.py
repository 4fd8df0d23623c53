"""Models whose forwards of another shape than the configured one can be held up. Each is a ``python:`` factory."""

from __future__ import annotations

from torch import Tensor, nn

from layertap.models.spec import InputSpec
from tests.service.nets_http import PATIENCE_S, Gated, Log

SIDE = 4
MAPS = InputSpec("x", (1, SIDE, SIDE))


class Maps(Gated):
    """Takes maps of any size; of another one than its own it waits before its two parts; notes which have run."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Conv2d(1, 1, 1) for _ in range(2))
        self.ran = Log()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != SIDE:
            self.entered.set()
            if not self.gate.wait(PATIENCE_S):
                raise TimeoutError("nobody opened the gate")
        for name in ("early", "late"):
            x = getattr(self, name)(x)
            self.ran.append(name)
        return x
