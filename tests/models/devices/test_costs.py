"""What a forward takes: bytes that are counted by hand, figures that make sense, and nothing that is left changed."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from layertap.models.devices import costs, memory
from layertap.models.devices.devices import count_cores, use_threads
from layertap.models.errors import InputError
from layertap.models.hooks import attach
from layertap.models.replica import call_module
from layertap.models.spec import InputSpec
from tests.conftest import Loader, net_spec
from tests.loading import load_model
from tests.nets import INPUTS, batch

LARGE = ("resnet", "bottlenecks", "vit", "swin")
CPU = torch.device("cpu")
FLOAT = 4  # bytes
Rows = Mapping[str, Tensor]


def peak(module: nn.Module, rows: Rows) -> int:
    """Bytes of a forward, in the mode in which forwards run."""
    with torch.no_grad():
        return memory.measure_peak_bytes(lambda given: module(*given.values()), rows, module, CPU)


def ones(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.ones(shape)}


# Bytes, counted by hand


class Keeps(nn.Module):
    """Holds on to every activation until it returns."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for _ in range(5):
            seen.append(seen[-1].tanh())
        return seen[-1]


class LetsGo(nn.Module):
    """The same without holding on to anything."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.tanh()
        return x


class Looks(nn.Module):
    """Makes nothing but views, of its input and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.T[1:].expand(5, 3, 4)
        return x.T[1:, :].unsqueeze(0).expand(7, 3, -1)


class Peaks(nn.Module):
    """Has something large for a moment, before the last thing is made."""

    def forward(self, x: Tensor) -> Tensor:
        large = torch.zeros(1000)
        small = x + large[0]
        del large
        return small * 2


class Twice(nn.Module):
    """Returns its input and the same new tensor under two names."""

    def forward(self, x: Tensor) -> dict[str, object]:
        y = x + 1
        return {"x": x, "y": y, "list": [y, y.view(-1)]}


class Narrow(nn.Module):
    """A view of a large tensor keeps all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(500)[:4] + x


class Small(nn.Module):
    """Numbers of other sizes: eight bytes, two, one."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.double(), x.half(), x > 0]


def linear(*widths: int, inplace: bool = False) -> nn.Sequential:
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        parts += [nn.Linear(wide, narrow), nn.ReLU(inplace)]
    return nn.Sequential(*parts[:-1])


# Numbers that a row takes at the worst moment: those of its input, and those of what is alive then.
BY_HAND: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "one layer": (lambda: linear(4, 8), 4, 8),
    "ReLU makes another": (lambda: linear(4, 8, 2), 4, 8 + 8),
    "the last is the largest": (lambda: linear(4, 8, 100), 4, 8 + 100),
    "in place": (lambda: linear(4, 8, 2, inplace=True), 4, 8 + 2),
    "in place, larger": (lambda: linear(4, 8, 20, 3, inplace=True), 4, 8 + 20),
    "views": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten()), 4, 8),
    "kept": (Keeps, 4, 5 * 4),
    "let go": (LetsGo, 4, 2 * 4),
    "only views": (Looks, 4, 0),
    "shared": (Twice, 4, 4),
    "nothing": (nn.Identity, 4, 0),
}


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", BY_HAND)
def test_peak_by_hand(name: str, rows: int) -> None:
    """Inputs and whatever is alive at the worst moment, byte for byte; weights and views do not count."""
    make, given, alive = BY_HAND[name]
    assert peak(make().eval(), ones(rows, given)) == rows * (given + alive) * FLOAT


def test_peak_of_a_moment() -> None:
    """What lives for a moment counts while it lives, and no longer."""
    assert peak(Peaks(), ones(1, 4)) == (4 + 1000 + 4) * FLOAT
    assert peak(Peaks(), ones(1, 600)) == (600 + 1000 + 600) * FLOAT
    assert peak(Peaks(), ones(1, 2000)) == (2000 + 2 * 2000) * FLOAT


def test_peak_of_a_view() -> None:
    """Of a view all of its memory counts."""
    assert peak(Narrow(), ones(1, 4)) == (4 + 500 + 4) * FLOAT


def test_peak_of_other_dtypes() -> None:
    assert peak(Small(), ones(2, 5)) == 10 * (4 + 8 + 2 + 1)


def test_peak_of_several_inputs() -> None:
    """All inputs count."""
    rows = {"a": torch.ones(3, 4), "b": torch.ones(3, dtype=torch.int64)}
    with torch.no_grad():
        found = memory.measure_peak_bytes(lambda given: given["a"] + given["b"][:, None], rows, nn.Identity(), CPU)
    assert found == 3 * (4 * 4 + 8 + 4 * 4)


class Cached(nn.Module):
    """Keeps a table that its first forward made."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(100)
        return x + self.table[0]


def test_peak_of_what_stays() -> None:
    """What a first forward leaves behind is no part of later ones."""
    module = Cached()
    assert peak(module, ones(1, 4)) == (4 + 100 + 4) * FLOAT
    assert peak(module, ones(1, 4)) == (4 + 4) * FLOAT


class Sparse(nn.Module):
    """Multiplies by a sparse matrix that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(torch.eye(4).to_sparse(), self.linear(x).T).T
        return out


class Opaque(Sparse):
    """Takes a tensor to a format of a library's own and back."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).to_mkldnn().to_dense()
        return out


@pytest.mark.parametrize("name", ["Sparse", "Opaque"])
def test_tensors_without_plain_memory(name: str) -> None:
    """A model that makes some loads, and whatever else it makes is counted."""
    model = load_model(replace(net_spec("Tied", inputs=(InputSpec("x", (4,)),)), source=f"python:{__name__}:{name}"))
    assert model.catalog.costs.row_bytes >= 2 * 4 * FLOAT


# Nothing is left changed


@pytest.mark.parametrize("name", ["resnet", "Chain", "Writes", "Keywords", "Sound", "Encoder", "Recurrent"])
def test_as_it_was(load_fresh_net: Loader, name: str) -> None:
    """Weights, buffers, modes, hooks and rows are the same afterwards, also where the model writes to its input."""
    model = load_fresh_net(name)
    rows = batch(model.inputs, 1)
    before = {key: value.clone() for key, value in rows.items()}
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    versions = [parameter._version for parameter in model.module.parameters()]
    forward = partial(call_module, module=model.module)
    with torch.no_grad():
        found = memory.measure_peak_bytes(forward, rows, model.module, CPU)
    costs.measure_forward(forward, rows, CPU, crosses_rows=model.catalog.crosses_rows, max_threads=2)
    assert found == model.catalog.costs.row_bytes >= sum(value.nbytes for value in rows.values())
    assert all(rows[key].equal(value) for key, value in before.items())
    assert all(value.equal(state[key]) for key, value in model.module.state_dict().items())
    assert [parameter._version for parameter in model.module.parameters()] == versions
    assert not any(part.training for part in model.module.modules())
    assert model.hooks == attach.count_hooks(model.module) == 0
    assert _get_current_dispatch_mode() is None


def test_a_forward_that_fails() -> None:
    """Its error comes through, and nothing watches operations any more."""
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        peak(nn.Linear(4, 4), ones(1, 5))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        costs.measure_forward(
            lambda rows: nn.Linear(4, 4)(rows["x"]), ones(1, 5), CPU, crosses_rows=False, max_threads=2
        )
    assert _get_current_dispatch_mode() is None
    assert torch.get_num_threads() == before


# Threads


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads(count: int) -> None:
    """So many inside, as many as before outside, also one within another and after an exception."""
    before = torch.get_num_threads()
    with use_threads(count):
        assert torch.get_num_threads() == count
        with use_threads(count + 1):
            assert torch.get_num_threads() == count + 1
        assert torch.get_num_threads() == count
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), use_threads(count):
        raise KeyError
    assert torch.get_num_threads() == before


def test_cores() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)


# Figures


def forwards(module: nn.Module, seen: list[tuple[int, int]]) -> Callable[[Rows], object]:
    """A forward that notes of how many rows it was, and with how many threads."""

    def run(rows: Rows) -> object:
        seen.append((len(rows["x"]), torch.get_num_threads()))
        return module(rows["x"])

    return run


def test_measure_again() -> None:
    """Where there are other loads' readings a few forwards do, also while it is not clear what all cores gain."""
    seen = list[tuple[int, int]]()

    def forward(rows: Rows) -> object:
        seen.append((len(rows["x"]), torch.get_num_threads()))
        end = time.thread_time() + 2 * costs.MIN_THREADED_S
        while time.thread_time() < end:  # a quicker one is not tried on several threads
            pass
        return None

    costs.measure_forward(forward, ones(1, 4), CPU, crosses_rows=True, max_threads=2, again=True)
    assert costs.MIN_ROUNDS <= seen.count((1, 2)) <= costs.ROUNDS_AGAIN
    assert costs.MIN_ROUNDS < seen.count((1, 1)) <= costs.ROUNDS_AGAIN + 1


@pytest.mark.parametrize("crosses_rows", [True, False])
def test_measure(crosses_rows: bool) -> None:
    """Figures that a policy can count with, of a few forwards; several rows only where rows do not meet."""
    module, seen = linear(4, 8, 2).eval(), list[tuple[int, int]]()
    reading = costs.measure_forward(forwards(module, seen), ones(1, 4), CPU, crosses_rows=crosses_rows, max_threads=2)
    measured = costs.make_costs([reading], 100)
    figures = (measured.base, measured.per_row, measured.speedup, float(measured.row_bytes))
    assert all(math.isfinite(figure) for figure in figures)
    assert measured.base >= 0 < measured.per_row
    assert measured.estimate_seconds(1) == measured.base + measured.per_row
    # Of a forward of one row, a row's part is between an eighth and all of it.
    assert measured.per_row * 2 * costs.BATCH_ROWS >= 0.999 * measured.estimate_seconds(1)
    assert measured.row_bytes == 100
    assert measured.speedup == 1.0
    assert {threads for _, threads in seen} == {1}
    assert {rows for rows, _ in seen} == ({1} if crosses_rows else {1, costs.BATCH_ROWS})
    assert len(seen) <= 2 + 2 * costs.MAX_ROUNDS
    if crosses_rows:
        assert measured.base == 0


@pytest.mark.parametrize("name", [name for name in INPUTS if name not in LARGE])
def test_figures_of_every_net(load_fresh_net: Loader, name: str) -> None:
    """Loading gives each model costs that are finite and positive."""
    model = load_fresh_net(name)
    figures = model.catalog.costs
    own = sum(math.prod(spec.shape) * (8 if spec.dtype == "int64" else FLOAT) for spec in model.inputs)
    assert figures.row_bytes > own
    assert all(math.isfinite(figure) for figure in (figures.base, figures.per_row, figures.speedup))
    assert figures.base >= 0 < figures.per_row
    assert figures.speedup == 1.0 or figures.speedup >= costs.MIN_SPEEDUP


def test_available() -> None:
    """There is some memory, and no more than the machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.measure_available_bytes(CPU) <= machine


# Costs in catalogues


def test_costs_of_the_configured_shape_by_hand(load_fresh_net: Loader) -> None:
    """A picture, what a convolution makes of it, means and scores."""
    costs = load_fresh_net("Chain").catalog.costs
    assert costs.row_bytes == (3 * 8 * 8 + 8 * 8 * 8 + 8 + 5) * FLOAT


def test_costs_of_another_shape(load_fresh_net: Loader) -> None:
    """Its memory is its own; its time follows from that of the configured shape."""
    model = load_fresh_net("Chain")
    known = model.catalog.costs
    larger, smaller = (model.catalogs.survey(((3, side, side),)) for side in (16, 4))
    assert larger.costs.row_bytes == (3 * 16 * 16 + 8 * 16 * 16 + 8 + 5) * FLOAT
    assert smaller.costs.row_bytes < known.row_bytes < larger.costs.row_bytes
    for other in (larger, smaller):
        assert (other.costs.base, other.costs.speedup) == (known.base, known.speedup)
        ratio = other.seconds / model.catalog.seconds
        assert other.costs.per_row == pytest.approx(known.per_row * ratio)
    assert model.catalog.costs is known


def test_costs_in_half_precision(load_fresh_net: Loader) -> None:
    """Half the bytes."""
    full, half = (load_fresh_net("Chain", dtype=dtype).catalog.costs.row_bytes for dtype in ("float32", "bfloat16"))
    assert full == 2 * half


def test_a_shape_that_the_model_does_not_take(load_fresh_net: Loader) -> None:
    """It has no costs, and nothing of trying them is left."""
    model = load_fresh_net("Chain")
    with pytest.raises(InputError):
        model.catalogs.survey(((4, 8, 8),))
    assert _get_current_dispatch_mode() is None
    assert model.hooks == 0


def test_pairs() -> None:
    """Whether all cores pay is tried several times in turn, more often than a forward of several rows."""
    module, seen = linear(4, 8, 2).eval(), list[tuple[int, int]]()
    run = forwards(module, seen)

    def forward(rows: Rows) -> object:
        end = time.thread_time() + costs.MIN_THREADED_S
        while time.thread_time() < end:  # as long as something that threads could share
            pass
        return run(rows)

    costs.measure_forward(forward, ones(1, 4), CPU, crosses_rows=False, max_threads=2)
    kinds = Counter(seen)
    assert kinds[1, 2] >= costs.MIN_PAIRS
    assert kinds[1, 1] == kinds[1, 2] + 1  # the first, which tells whether it takes too long
