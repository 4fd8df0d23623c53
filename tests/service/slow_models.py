"""Models that wait for a file: to be loaded, or in a forward. Each class is a ``python:`` factory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from tests.service.nets_http import Scores

TRY_S = 0.02
WIDE = 6  # numbers of a row that has another shape than the configured one


class GatedLoad(Scores):
    """Is built once there is a file; which process builds it stands in another."""

    def __init__(self, gate: str) -> None:
        wait_for_file(gate)
        super().__init__()


class GatedForward(Scores):
    """Has its first forward once there is a file; which process runs it stands in another."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        wait_for_file(self.gate)
        return super().forward(x)


class GatedBoth(GatedForward):
    """Both of these."""

    def __init__(self, built: str, ran: str) -> None:
        wait_for_file(built)
        super().__init__(ran)


class HangsOnWide(nn.Module):
    """Never gives anything of a picture that is not as wide as it is high."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        while x.shape[-1] != x.shape[-2]:
            time.sleep(TRY_S)
        return self.conv(x)


def wait_for_file(path: str) -> None:
    """Return once there is a file; who waits stands in another."""
    if not Path(path).exists():
        Path(f"{path}.begun").write_text(str(os.getpid()))
    while not Path(path).exists():
        time.sleep(TRY_S)
