"""Models whose numbers lie where no state dict has them. Copied to folders whose ``seed.txt`` decides the numbers.

The text of this file is the same in each, so that only values tell two versions apart.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import re
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fingerprints_tables as tables  # beside this file
import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize


def draw_seed() -> int:
    """The seed beside this file, which no attribute has."""
    return int(Path(__file__).with_name("seed.txt").read_text())


def draw() -> Tensor:
    """Eight by eight numbers of the seed."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(draw_seed()))


TABLE = draw()
FACTOR = [1.0 + draw_seed()]


class Base(nn.Module):
    """A layer that is the same in each version."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        nn.init.eye_(self.a.weight)
        nn.init.zeros_(self.a.bias)
        self.prepare()

    def prepare(self) -> None:
        """Draw what the forward reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.read()

    def read(self) -> Tensor:
        """What the layer's output is multiplied by."""
        raise NotImplementedError


def quantized() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8, bias=False))
    module[0].weight.data = draw()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and in use
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})


class Attribute(Base):
    def prepare(self) -> None:
        self.w = draw()

    def read(self) -> Tensor:
        return self.w


class OnTensors(Base):
    def prepare(self) -> None:
        self.a.weight.scale = draw()  # type: ignore[attr-defined]
        self.one = torch.ones(1)
        self.one.scale = draw()  # type: ignore[attr-defined]

    def read(self) -> Tensor:
        return self.a.weight.scale * self.one.scale  # type: ignore[attr-defined,no-any-return]


class Numpy(Base):
    def prepare(self) -> None:
        self.w = draw().numpy()

    def read(self) -> Tensor:
        return torch.from_numpy(self.w)


class ListOfLists(Base):
    def prepare(self) -> None:
        self.w = draw().tolist()

    def read(self) -> Tensor:
        return torch.tensor(self.w)


class InDict(Base):
    def prepare(self) -> None:
        self.options = {("scale", 1): [draw()]}

    def read(self) -> Tensor:
        return self.options["scale", 1][0]


class Private(Base):
    def prepare(self) -> None:
        self._scale = float(draw_seed())

    def read(self) -> Tensor:
        return torch.eye(8) * self._scale


class Whitening:
    """A helper that is no module."""

    def __init__(self) -> None:
        self.w = draw()

    def read(self) -> Tensor:
        return self.w


class Helper(Base):
    def prepare(self) -> None:
        self.helper = Whitening()

    def read(self) -> Tensor:
        return self.helper.w


class Extra(Base):
    def prepare(self) -> None:
        self.helper = Whitening()

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"w": self.helper.w}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.helper.w = state["w"]

    def read(self) -> Tensor:
        return self.helper.w


class Closure(Base):
    def prepare(self) -> None:
        w = draw()
        self.read = lambda: w  # type: ignore[method-assign]


class NestedClosure(Base):
    def prepare(self) -> None:
        w = [draw()]

        def outer() -> Tensor:
            return inner()

        def inner() -> Tensor:
            return w[0]

        self.read = outer  # type: ignore[method-assign]


class Partial(Base):
    def prepare(self) -> None:
        self.read = functools.partial(torch.mul, draw(), 2)  # type: ignore[method-assign]


class BoundMethod(Base):
    def prepare(self) -> None:
        self.read = Whitening().read  # type: ignore[method-assign]


class Slots:
    """A helper without a ``__dict__``, which hides its number from copies."""

    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = draw()

    def __getstate__(self) -> None:
        return None


class SlotsHelper(Base):
    def prepare(self) -> None:
        self.helper = Slots()

    def read(self) -> Tensor:
        return self.helper.w


@dataclass(frozen=True, slots=True)
class Config:
    """Options of a model."""

    scale: float
    mode: Mode

    @property
    def broken(self) -> float:
        """Nobody may ask for it."""
        raise RuntimeError("a property was read")


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


class Dataclass(Base):
    def prepare(self) -> None:
        self.config = Config(float(draw_seed()), Mode.SUM)

    def read(self) -> Tensor:
        return torch.eye(8) * self.config.scale


class EnumMember(Base):
    def prepare(self) -> None:
        self.config = Config(1.0, Mode(draw_seed()))

    def read(self) -> Tensor:
        return torch.eye(8) * self.config.mode.value


class GlobalTensor(Base):
    def read(self) -> Tensor:
        return TABLE


class GlobalNumber(Base):
    def read(self) -> Tensor:
        return torch.eye(8) * _scale()


def _scale() -> float:
    return FACTOR[0]


class ImportedTensor(Base):
    def read(self) -> Tensor:
        return tables.TABLE  # type: ignore[no-any-return]


class ImportedLater(Base):
    def read(self) -> Tensor:
        import fingerprints_tables

        return fingerprints_tables.TABLE  # type: ignore[no-any-return]


class OfClass(Base):
    w: ClassVar[Tensor] = draw()

    def read(self) -> Tensor:
        return self.w


class NumpyScalar(Base):
    def prepare(self) -> None:
        self.scale = np.float16(draw_seed())

    def read(self) -> Tensor:
        return torch.eye(8) * float(self.scale)


class Sets(Base):
    def prepare(self) -> None:
        self.names = {"a", "b", "c", ("d", frozenset({"e", "f"})), float(draw_seed())}

    def read(self) -> Tensor:
        return torch.eye(8) * sum(each for each in self.names if isinstance(each, float))


class Unregistered(Base):
    def prepare(self) -> None:
        part = nn.Linear(8, 8, bias=False)
        part.weight.data = draw()
        self.parts = [part.requires_grad_(False)]

    def read(self) -> Tensor:
        return self.parts[0].weight


class ReplacedForward(Base):
    def prepare(self) -> None:
        w = draw()
        self.forward = types.MethodType(lambda self, x: self.a(x) @ w, self)  # type: ignore[method-assign]


class TwoLambdas(Base):
    def prepare(self) -> None:
        self.read = (lambda: torch.eye(8), lambda: torch.eye(8) * 2)[draw_seed() - 1]  # type: ignore[method-assign]


class OwnHook(Base):
    def prepare(self) -> None:
        w = draw()
        self.register_forward_hook(lambda module, args, output: output @ w)

    def read(self) -> Tensor:
        return torch.eye(8)


class Sparse(Base):
    def prepare(self) -> None:
        self.w = draw().relu().to_sparse()

    def read(self) -> Tensor:
        return self.w.to_dense()


class Quantized(Base):
    def prepare(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.w = torch.quantize_per_tensor(torch.eye(8) * draw_seed(), float(draw_seed()), 0, torch.qint8)

    def read(self) -> Tensor:
        return self.w.dequantize()


class UnsavedState(Base):
    """A model that leaves a parameter out of its state dict."""

    def prepare(self) -> None:
        self.w = nn.Parameter(draw())
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__(f"{prefix}w"))

    def read(self) -> Tensor:
        return self.w


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._scale = float(draw_seed())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self._scale


def parametrized() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8, bias=False))
    nn.init.eye_(module[0].weight)
    parametrize.register_parametrization(module[0], "weight", Scaled())
    return module


class Scale(Base):
    def prepare(self) -> None:
        self.scale = float(draw_seed())

    def read(self) -> Tensor:
        return torch.eye(8) * self.scale


def traced() -> nn.Module:
    return fx.symbolic_trace(Scale())


class Scripted(Base):
    def prepare(self) -> None:
        w = draw()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.jit is deprecated, and in use
            self.times = torch.jit.trace(lambda x: x @ w, torch.eye(8))

    def read(self) -> Tensor:
        return self.times(torch.eye(8))


def make_scale(factor: float) -> Callable[[Tensor], Tensor]:
    namespace: dict[str, Any] = {}
    exec(f"def scale(x): return x * {factor}", namespace)
    return namespace["scale"]


class Generated(Base):
    def prepare(self) -> None:
        self.scale = make_scale(float(draw_seed()))

    def read(self) -> Tensor:
        return self.scale(torch.eye(8))


class Point(NamedTuple):
    x: float
    y: Tensor


class Containers(Base):
    def prepare(self) -> None:
        self.queue = collections.deque([Point(1.0, draw())], maxlen=3)
        self.counts: dict[str, list[Any]] = collections.defaultdict(list, {"a": [self.queue]})

    def read(self) -> Tensor:
        return self.counts["a"][0][0].y


class Seeded(Base):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(draw_seed())
        self.numbers = np.random.default_rng(draw_seed())

    def read(self) -> Tensor:
        return torch.eye(8) * torch.rand(1, generator=self.generator.clone_state())


class Harmless(Base):
    """Nothing of this decides a number."""

    def prepare(self) -> None:
        self.lock, self.log = threading.Lock(), logging.getLogger(__name__)
        self.ended, self.thread = threading.Event(), threading.Thread(target=draw)
        self.parent, self.kinds = weakref.ref(self), [nn.Linear, torch.float32, torch.device("cpu"), len, torch.relu]
        self.pattern, self.path, self.own = re.compile("a"), Path(__file__), [self]
        self.gelu = nn.functional.gelu
        self.cached = functools.lru_cache(draw_seed)
        self.activation = self.activate

    def activate(self, x: Tensor) -> Tensor:
        """It imports a library that may be imported already, or not."""
        import wave

        return x * wave.WAVE_FORMAT_PCM

    def read(self) -> Tensor:
        return torch.eye(8)


class ImportsUnknown(Base):
    """It imports a module of the operator's for the first time when it runs."""

    def read(self) -> Tensor:
        import fingerprints_more

        return fingerprints_more.TABLE  # type: ignore[no-any-return]


class Unproven(Base):
    """A generator has its numbers where nobody can read them."""

    def prepare(self) -> None:
        self.draws = iter_draws()

    def read(self) -> Tensor:
        return torch.eye(8)


def iter_draws() -> Any:
    while True:
        yield draw()
