"""Models whose axes no shape tells apart: what operations work along does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracle import seeded


class Apply(nn.Module):
    """Parts in order, and turns between them, as numbers of axes."""

    def __init__(self, **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.steps: list[str | tuple[int, ...]] = []
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            self.steps.append(name if isinstance(part, nn.Module) else part)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = getattr(self, step)(x) if isinstance(step, str) else x.permute(step)
        return x


class MixAlong(nn.Module):
    """A product with a matrix, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nchw,cd->nhwd", x, self.weight)


class Mixer(nn.Module):
    """MLP-Mixer: a linear layer over turned tokens, and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.act = nn.LayerNorm(10), nn.Linear(7, 7), nn.GELU()
        self.channels = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(self.mix(self.norm(x).mT)).mT
        return x + self.channels(x)


class Turned(nn.Module):
    """Linear layers alone: one over turned tokens, and one over channels behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(3, 5), nn.Linear(7, 7), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x).mT)
        return self.head(x.mean(2)) / x.quantile(0.9)


class Video(nn.Module):
    """Frames folded into the rows of a convolution, and taken apart behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.apart, self.frames = nn.Conv2d(3, 6, 3), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x.flatten(0, 1))
        return self.frames(self.apart(maps.view(*x.shape[:2], *maps.shape[1:])).mean((3, 4)))


class Heads(nn.Module):
    """Attention with rows, heads, tokens and widths."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.apart, self.head = nn.Linear(12, 12), nn.Identity(), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        query = self.apart(self.query(x).unflatten(2, (3, 4)).transpose(1, 2))
        attended = functional.scaled_dot_product_attention(query, query, query)
        return self.head(attended.transpose(1, 2).flatten(2))


class Depth(nn.Module):
    """A map of one number for each pixel, without an axis for channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).squeeze(1)


class Spectrum(nn.Module):
    """A spectrogram, (frequencies, time), convolved as a picture of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.conv = nn.Identity(), nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pre(x)[:, None]).mean((2, 3))


class Square(nn.Module):
    """As many channels as rows and columns, turned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.back = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class ChannelAttention(nn.Module):
    """ECA: a convolution over the channels themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.eca, self.scaled = nn.Conv2d(3, 8, 1), nn.Conv1d(1, 1, 3, padding=1), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.scaled(x * self.eca(x.mean((2, 3))[:, None]).sigmoid()[:, 0, :, None, None])


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "flatten": (lambda: Apply(conv=nn.Conv2d(3, 8, 1), last=nn.Flatten(2)), (3, 4, 5)),
    "shuffle": (lambda: Apply(conv=nn.Conv2d(3, 32, 1), shuffle=nn.PixelShuffle(2), last=nn.ReLU()), (3, 6, 8)),
    "unfold": (lambda: Apply(last=nn.Unfold(2, stride=2), turn=(0, 2, 1), linear=nn.Linear(12, 5)), (3, 6, 8)),
    "hwc": (lambda: Apply(last=nn.Identity(), turn=(0, 3, 1, 2), conv=nn.Conv2d(3, 8, 3)), (6, 9, 3)),
    "wave": (lambda: Apply(pre=nn.Identity(), turn=(0, 2, 1), conv=nn.Conv1d(6, 9, 3), last=nn.GELU()), (40, 6)),
    "einsum": (lambda: Apply(conv=nn.Conv2d(3, 12, 1), last=MixAlong()), (3, 6, 12)),
    "mixer": (Mixer, (7, 10)),
    "turned": (Turned, (7, 3)),
    "video": (Video, (4, 3, 6, 8)),
    "heads": (Heads, (5, 12)),
    "depth": (Depth, (3, 6, 8)),
    "spectrum": (Spectrum, (8, 11)),
    "square": (Square, (3, 8, 8)),
    "eca": (ChannelAttention, (3, 5, 6)),
}


def make(name: str) -> nn.Module:
    """One of the nets, with seeded weights."""
    return seeded(NETS[name][0](), 0).eval()
