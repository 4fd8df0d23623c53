"""Models of pictures: one whose layers have hostile names, one that can be held up. Each is a factory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.service.nets_http import Gated

MARKUP = "<script>title='taken'</script><img src=x onerror=alert(1)>"


class Marked(nn.Module):
    """Its layer's name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({MARKUP: nn.Conv2d(3, 4, 3, padding=1)})

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.layers[MARKUP](x)
        return mapped.mean((2, 3))


class Held(Gated):
    """Maps that come once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.flatten(self.conv(x), 1)[:, :4])
