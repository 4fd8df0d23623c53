"""torch's compilers beside construction.py, in a process: ``python -m tests.models.sources.compilers first|last``.

Where the import comes last, the compilers have been at work before it.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor, nn


def default(x: Tensor) -> Tensor:
    return x.new_ones(2, dtype=torch.get_default_dtype())


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(2)


class Default(nn.Module):
    """The first function as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return default(x)


def twice(x: Tensor) -> Tensor:
    return 2 * x


def check() -> None:
    """Compile, export and script what asks for the default dtype or sets the seed."""
    given = torch.zeros(2)
    compiled = torch.compile(default, backend="eager", fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert compiled(given).dtype == dtype
    exported = torch.export.export(Default(), (given,), strict=True)
    assert exported.module()(given).dtype == torch.float32
    assert torch.equal(torch.jit.script(seeding)(given), seeding(given))


if __name__ == "__main__":
    if sys.argv[1] == "last":
        torch.compile(twice, backend="eager")(torch.ones(2))
        torch.jit.script(twice)
    importlib.import_module("layertap.models.sources.construction")
    check()
