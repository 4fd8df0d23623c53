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


class Bracketed(nn.Module):
    """The names of its layers have all that selectors read as something else."""

    NAMES = ("conv[0]", "conv#1", "conv:input", "up/add", "a*b")

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(self.NAMES):
            self.add_module(name, nn.Conv2d(3 if number == 0 else 4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))


class Patches(nn.Module):
    """A vision transformer of one block for pictures of any size: patches of 4 pixels a side behind a class token."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        normed = self.norm(tokens)
        mixed: Tensor = self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head((tokens + mixed)[:, 0])


class Windowed(nn.Module):
    """Attention within windows of 2 by 2 patches, then among all 4 by 4 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.windows = nn.MultiheadAttention(8, 2, batch_first=True)
        self.whole = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.patch(x)
        windows = maps.unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 8)
        tokens = self.windows(windows, windows, windows)[0].reshape(len(x), 16, 8)
        return self.head(self.whole(tokens, tokens, tokens)[0].mean(1))
