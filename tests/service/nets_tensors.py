"""Models whose layers return tensors of odd kinds: in memory of other shapes, lazily conjugated, of other classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Sub(torch.Tensor):
    """A class that adds nothing."""


class Wrapper(torch.Tensor):
    """A class whose numbers are in another tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return,no-untyped-call]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError("no operation is written for it")


def without_warnings(make: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Of what torch itself calls a prototype, or deprecated."""

    def quiet(x: Tensor) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(x)

    return quiet


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x.new_tensor([2.0]).expand(len(x), 1),
    "one_number": lambda x: x.new_tensor(2.0).expand(len(x), 1),
    "repeated": lambda x: x[:, :1].expand(len(x), 5),
    "strided": lambda x: torch.cat([x, x], 1)[:, ::3],
    "transposed": lambda x: x.reshape(len(x), 2, 2).transpose(1, 2),
    "empty": lambda x: x[:, :0],
    "no_axes": lambda x: x.new_tensor(3.0),
    "negative": lambda x: torch.complex(x, x + 1).conj().imag,
    "subclass": lambda x: x.as_subclass(Sub),
    "parameter": nn.Parameter,
    "offset": lambda x: torch.cat([x, x], 1)[:, 3:],
    "rounded": lambda x: x.bfloat16().expand(2, *x.shape)[0],
}
REFUSED: dict[str, tuple[str, Callable[[Tensor], object]]] = {  # with the word that says why
    "conjugate": ("complex64", lambda x: torch.complex(x, x + 1).conj()),
    "sparse": ("is sparse", lambda x: x.to_sparse()),
    "nested": ("is nested", without_warnings(lambda x: torch.nested.nested_tensor(list(x)))),
    "quantized": ("is quantized", without_warnings(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))),
    "wrapper": ("is wrapped", Wrapper),
    "meta": ("is on the meta device", lambda x: x.to("meta")),
}


class Make(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        """Whatever that is."""
        return self.make(x)


class Doubles(nn.Module):
    """A layer within ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Row by row."""
        return torch.vmap(lambda row: self.inner(row) * 2)(x)


class Odd(nn.Module):
    """A layer for each kind of tensor, side by side."""

    def __init__(self) -> None:
        super().__init__()
        makes = DENSE | {name: make for name, (_, make) in REFUSED.items()}
        self.layers = nn.ModuleDict({name: Make(make) for name, make in makes.items()})
        self.vmapped = Doubles()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Each of them, and something plain."""
        for layer in self.layers.values():
            layer(x)
        return self.linear(self.vmapped(x))


class Numbers(nn.Module):
    """Means of colours, their logarithms and roots where these are none, zeros, and numbers beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.means = Make(lambda x: x.mean((2, 3)))
        self.logs = Make(torch.log)  # type: ignore[arg-type]
        self.roots = Make(torch.sqrt)  # type: ignore[arg-type]
        self.zeros = Make(torch.zeros_like)  # type: ignore[arg-type]
        self.large = Make(lambda x: x * 1e6)

    def forward(self, x: Tensor) -> object:
        """(rows, 3): the means."""
        means = self.means(x)
        for layer in (self.logs, self.roots, self.zeros, self.large):
            layer(means)
        return means
