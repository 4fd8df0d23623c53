"""Small real modules, one for each thing that a model may do to whoever hooks it, and what they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import VisionTransformer as Vit
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import SwinTransformer

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.devices.devices import DTYPES
from layertap.models.spec import InputSpec
from tests.oracle import seeded


def batch(inputs: Sequence[InputSpec], rows: int, seed: int = 0) -> dict[str, Tensor]:
    """So many random rows; integers are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(rows, *spec.shape, generator=generator).to(DTYPES[spec.dtype])
        if DTYPES[spec.dtype].is_floating_point
        else torch.randint(0, 2, (rows, *spec.shape), generator=generator)
        for spec in inputs
    }


def surveyed(module: nn.Module, *shape: int, prefix: int = 0) -> Catalog:
    """The catalog of a module for float32 rows of one shape."""
    specs = (InputSpec("x", shape),)
    device = torch.device("cpu")
    return survey(module.eval(), specs, lambda rows: module(*rows.values()), device, prefix, torch.float32)


def resnet() -> ResNet:
    """Basic blocks: ``out += identity`` after ``bn2``, in-place ReLUs that run twice."""
    return seeded(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=7), 1)


def bottlenecks() -> ResNet:
    """Bottleneck blocks: one ReLU that runs three times in each."""
    return seeded(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7), 2)


def vit() -> Vit:
    """One class token and 4 x 4 patches of 8 pixels."""
    module = Vit(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=7)
    module.num_prefix_tokens = 1
    return seeded(module, 3)


def swin() -> SwinTransformer:
    """NHWC inside, windows of 4 x 4 folded into the batch."""
    return seeded(SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=7), 4)


class Chain(nn.Module):
    """A plain stack of convolutions whose ReLU writes in place, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.relu(self.conv(image))
        x -= 0.3
        x = self.relu(x)
        return self.head(x.mean((2, 3)))


class Rounds(nn.Module):
    """Rounds otherwise if a number of the batch is large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where((x > 1e5).any(), x * 3 / 3, x)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Card:
    value: Tensor
    note: str
    more: list[Tensor]


class Nested(nn.Module):
    """Whatever a module may return: a dictionary of everything else."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "pair": Pair(x + 1, x * 2),
            "card": Card(x.sin(), "a note", [x.cos(), x.tan()]),
            "nothing": None,
            "count": 3,
            "list": [(x - 1,), x > 0],
            "index": x.argmax(-1),
        }


class Structured(nn.Module):
    """Returns nested containers and calls a part that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nested = nn.Linear(4, 6), Nested()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return self.nested(self.linear(x))


class Gate(nn.Module):
    """Takes what it needs by position and by name."""

    def forward(self, x: Tensor, *, gate: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        out = x * gate.sigmoid() * scale
        return out if bias is None else out + bias


class Keywords(nn.Module):
    """Two inputs by name; calls a part with keywords, once with fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.gate = nn.Embedding(2, 6), nn.Linear(4, 6), Gate()

    def forward(self, *, pixels: Tensor, kind: Tensor) -> Tensor:
        x = self.linear(pixels)
        x = self.gate(x, gate=self.embed(kind), scale=2.0)
        return self.gate(x=x, gate=x, bias=x)


class Tied(nn.Module):
    """One linear layer under two names, called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 5)
        self.decode = self.encode
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.act(self.encode(x)))


class NeverCalled(nn.Module):
    """Uses the weights of one part without calling it; many calls of another before the last part runs."""

    def __init__(self) -> None:
        super().__init__()
        self.silent, self.often, self.last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.silent.weight)
        for _ in range(20):
            x = self.often(x)
        return self.last(x)


class TimeFirst(nn.Module):
    """Attention that runs (T, N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x).transpose(0, 1)
        y = self.norm(y + self.attention(y, y, y)[0])
        return y.transpose(0, 1)


class TimeOut(TimeFirst):
    """The same, and the output stays (T, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class BatchCentred(nn.Module):
    """Each row loses the mean of all rows, by a part; another part returns that mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), Mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x - self.mean(x)


class Mean(nn.Module):
    """Over axis 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


class Recurrent(nn.Module):
    """An LSTM that takes axis 0 for time: a row depends on the rows before it, never on those after."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Backwards(Recurrent):
    """A row depends on the rows after it, never on those before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(0)).flip(0)


class Inner(nn.Module):
    """Rows meet inside, and the output does not show it: similarities, the first row, the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.similar, self.first = nn.Linear(4, 3), Similar(), First()
        self.mean, self.table = Mean(), Table()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.similar(x), self.first(x), self.mean(x)
        return x + self.table(x)


class Similar(nn.Module):
    """(N, N)."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class First(nn.Module):
    """The first row alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x[0]


class Table(nn.Module):
    """A parameter, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.values


class OneRow(nn.Module):
    """Takes one row at a time, and drops its axis inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 3), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            raise ValueError("one row at a time")
        out: Tensor = self.act(self.linear(x)[0])
        return out[None]


class Windows(nn.Module):
    """Folds windows of tokens into the batch axis, row by row, and unfolds them again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, channels = x.shape
        folded = self.inner(self.fold(x.reshape(rows, tokens // 2, 2, channels)))
        return self.unfold(folded, rows).reshape(x.shape)

    def fold(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def unfold(self, x: Tensor, rows: int) -> Tensor:
        return x.reshape(rows, -1, *x.shape[1:])


class WindowMajor(Windows):
    """The same, but the windows of one place of all rows stand together."""

    def fold(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1)

    def unfold(self, x: Tensor, rows: int) -> Tensor:
        return x.reshape(-1, rows, *x.shape[1:]).transpose(0, 1)


class Swallows(nn.Module):
    """Catches every Exception of a part and goes on without it; counts how often the tail ran."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 2)
        self.tails = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.head(x)
        except Exception:
            x = x + 1
        self.tails += 1
        return self.tail(x)


class Countdown(nn.Module):
    """Calls itself: call 0 begins first and ends last."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return x + 1
        below: Tensor = self(x * 2, depth - 1)
        return below + x


class Recursive(nn.Module):
    """Holds a part that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = Countdown(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(x))


class EarlyExit(nn.Module):
    """Runs its second half only for inputs that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.abs().amax() < 1000:
            x = self.second(x)
        return x


class Pruned(nn.Module):
    """Keeps as many tokens as are large: another number for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.linear = Keep(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.keep(x)).mean(1)


class Keep(nn.Module):
    """All tokens, or half of them where the input is far from zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2] if x.mean() > 50 else x


class DTypes(nn.Module):
    """Leaves of every kind of number."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "double": x.double(),
            "half": x.half(),
            "brain": x.bfloat16(),
            "index": x.long(),
            "small": x.to(torch.int8),
            "flag": x > 0,
            "complex": torch.complex(x, x),
        }


class Kinds(nn.Module):
    """Holds a part with leaves of every kind of number."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = DTypes()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.kinds(x * 20)["double"]
        return out.float()


class Views(nn.Module):
    """Parts that return views: of a larger storage, expanded, channels last, and of their own input."""

    def __init__(self) -> None:
        super().__init__()
        self.slice, self.same, self.wide = Slice(), nn.Identity(), Wide()
        self.last = Last()

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(x)
        y = self.slice(x) + self.wide(x)
        self.last(x)
        x.zero_()
        return y


class Slice(nn.Module):
    """One position of many."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 0, 0]


class Wide(nn.Module):
    """One column, expanded."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1, 0, 0].expand(-1, x.shape[1])


class Last(nn.Module):
    """The same values in another order of memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class Residual2d(nn.Module):
    """Channels first; its output comes out of a function, and of another shape than what came in."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)
        self.down = nn.Conv2d(channels, out_channels, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), self.down(x)], 1).relu()


class ChannelsLast(nn.Module):
    """Linear layers over the last axis of (N, H, W, C), a residual between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Cube(nn.Module):
    """Where channels, height and width may all be equal, first one way round, then the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.act = nn.Conv2d(3, 8, 1), Residual2d(8, 4), nn.ReLU()
        self.last, self.again = ChannelsLast(8), nn.Sequential(ChannelsLast(8), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.down(self.stem(x)))
        x = self.again(self.last(x.permute(0, 2, 3, 1)) * 2)
        return x.mean((1, 2))


class Writes(nn.Module):
    """Writes into its own input, as a model's preprocessing may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x)


class SinkAttention(nn.Module):
    """A learned sink for each head: softmax is over it too, its weight is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.sinks = nn.Linear(8, 24), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = query @ key.transpose(2, 3)
        scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        weights = functional.softmax(scores - scores.amax(-1, keepdim=True), -1)[..., :-1]
        return (functional.dropout(weights, 0.1, self.training) @ value).transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """PyTorch's own encoder layer, which takes a fused path where nobody hooks it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[:, 0])


def _x(*shape: int) -> tuple[InputSpec, ...]:
    return (InputSpec("x", shape),)


class SlowOnWide(nn.Module):
    """Takes its time for pictures that are wider than high."""

    SECONDS = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > x.shape[-2]:
            time.sleep(self.SECONDS)
        out: Tensor = self.conv(x)
        return out


INPUTS: dict[str, tuple[InputSpec, ...]] = {
    # Wide, not high: where a CPU has AMX, oneDNN of torch 2.15 reads what nobody wrote, in 16-bit convolutions of
    # stride 2 over maps of two columns and three rows or more.
    "resnet": _x(3, 32, 40),
    "bottlenecks": _x(3, 32, 32),
    "vit": _x(3, 32, 32),
    "swin": _x(3, 32, 48),
    "Chain": _x(3, 8, 8),
    "Structured": _x(4),
    "Keywords": (InputSpec("pixels", (4,)), InputSpec("kind", (), "int64")),
    "Tied": _x(5),
    "NeverCalled": _x(4),
    "TimeFirst": _x(5, 6),
    "TimeOut": _x(5, 6),
    "BatchCentred": _x(4),
    "Recurrent": _x(3, 4),
    "Backwards": _x(3, 4),
    "Inner": _x(4),
    "OneRow": _x(4),
    "Windows": _x(8, 6),
    "WindowMajor": _x(8, 6),
    "Swallows": _x(4),
    "Recursive": _x(4),
    "EarlyExit": _x(4),
    "Pruned": _x(6, 4),
    "Kinds": _x(4),
    "Views": _x(4, 8, 8),
    "Cube": _x(3, 16, 16),
    "Writes": _x(4),
    "Encoder": _x(5, 8),
}
