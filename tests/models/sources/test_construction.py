"""What a thread that constructs a module has for itself: random numbers and the default dtype."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from layertap.models.sources.construction import isolate_construction
from layertap.models.weights.state_dict import digest_weights
from tests.marks import slow

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(17, dtype=torch.float64),
    "randint": lambda: torch.randint(9, (5,)),
    "randint of a range": lambda: torch.randint(3, 9, (5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randn_like": lambda: torch.randn_like(torch.ones(5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 2, 9),
    "normal": lambda: torch.normal(1.0, 2.0, (5,)),
    "normal of tensors": lambda: torch.normal(torch.ones(5), 2.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(4, 4)),
    "seeds itself": lambda: (torch.rand(3), torch.manual_seed(11), torch.rand(3))[-1],
    "forks": lambda: _forked(),
    "module": lambda: torch.cat([value.flatten() for value in nn.TransformerEncoderLayer(8, 2, 8).parameters()]),
}


def _forked() -> Tensor:
    first = torch.rand(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second = torch.rand(3)
    return torch.cat([first, second, torch.rand(3)])


@contextmanager
def alone() -> Iterator[None]:
    """The process's own generator and default dtype, put back afterwards."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers(name: str) -> None:
    """Under a seed every operation draws what it draws after manual_seed, and the process's generator stays."""
    draw = DRAWS[name]
    with alone():
        torch.manual_seed(5)
        expected = [draw(), draw()]
    before = torch.get_rng_state()
    with isolate_construction(5):
        found = [draw(), draw()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed() -> None:
    """Without a seed a module has the numbers that the process would draw next, and draws after it."""
    with alone():
        torch.manual_seed(99)
        with isolate_construction(None):
            found = torch.rand(3)
        assert torch.equal(torch.rand(3), found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 2, 3), lambda: nn.ConvTranspose2d(3, 2, 3)])
def test_traced_convolutions(make: Callable[[], nn.Module]) -> None:
    """A convolution that is traced while constructing computes what it computes, and draws what it draws untraced."""
    given = torch.linspace(-1, 1, 75).reshape(1, 3, 5, 5)
    with isolate_construction(3):
        plain = make()
    with isolate_construction(3):
        module = make()
        traced = torch.jit.trace(module, given)
    assert torch.equal(traced(given), plain(given))


def test_without_a_seed_inside_another() -> None:
    """Without a seed the numbers and the default dtype are those of the construction around it."""
    with isolate_construction(5):
        torch.set_default_dtype(torch.float64)
        torch.rand(2)
        with isolate_construction(None):
            found = torch.rand(3)
        assert found.dtype == torch.float64
        assert torch.equal(torch.rand(3), found)


def test_who_draws_beside() -> None:
    """Forwards of other threads that draw change nothing in a module, and find their own numbers going on."""
    with ThreadPoolExecutor(1) as pool, alone():
        torch.manual_seed(3)
        expected = torch.rand(6)
        torch.manual_seed(3)
        drawn = [pool.submit(torch.rand, 3).result()]
        with isolate_construction(0):
            beside = [nn.Linear(3, 2), drawn.append(pool.submit(torch.rand, 3).result()), nn.Linear(3, 2)]
        with isolate_construction(0):
            quiet = [nn.Linear(3, 2), nn.Linear(3, 2)]
    assert torch.equal(torch.cat(drawn), expected)
    assert [digest_weights(each) for each in beside if each] == [digest_weights(each) for each in quiet]


def test_seed_reaches_construction_and_nothing_else() -> None:
    """Two constructions under one seed are equal, under another differ, and the process's random numbers go on."""
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    made = []
    for seed in (5, 5, 6):
        with isolate_construction(seed):
            made.append(digest_weights(nn.Linear(3, 2)))
    assert torch.equal(torch.rand(3), expected)
    assert made[0] == made[1] != made[2]
    torch.manual_seed(5)
    assert digest_weights(nn.Linear(3, 2)) == made[0]


VALUES: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(2).zero_(),
    "zeros": lambda: torch.zeros(2),
    "ones of a named dtype": lambda: torch.ones(2, dtype=torch.float32),
    "full": lambda: torch.full((2,), 1 / 3),
    "full of whole numbers": lambda: torch.full((2,), 3),
    "full of truth": lambda: torch.full((2,), True),
    "eye": lambda: torch.eye(2),
    "arange": lambda: torch.arange(5),
    "arange of fractions": lambda: torch.arange(0, 1, 0.1),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "tensor": lambda: torch.tensor([1 / 3, 2.0]),
    "tensor of whole numbers": lambda: torch.tensor([1, 2]),
    "tensor of an array": lambda: torch.tensor(torch.ones(2, dtype=torch.float64).numpy()),
    "tensor of a named array": lambda: torch.tensor(data=np.ones(2, np.float32)),
    "tensor of numpy's numbers": lambda: torch.tensor([np.float32(0.1)]),
    "tensor of both": lambda: torch.tensor([0.1, np.float32(0.1)]),
    "tensor of numpy's float": lambda: torch.tensor([np.float64(0.1)]),
    "tensor of tensors": lambda: torch.tensor([torch.tensor(0.1, dtype=torch.float32)]),
    "as_tensor": lambda: torch.as_tensor(1 / 3),
    "as_tensor of a named array": lambda: torch.as_tensor(data=np.ones(2, np.float32)),
    "full of numpy's number": lambda: torch.full((2,), np.float32(0.1)),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal of tensors": lambda: torch.normal(torch.ones(5, dtype=torch.float32), 1.0),
    "sparse": lambda: _sparse([0.1, 0.2]),
    "sparse of a named dtype": lambda: _sparse(torch.ones(2, dtype=torch.float32)),
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5),
    "window": lambda: torch.hann_window(5),
    "quotient": lambda: torch.arange(7) / 3,
    "product": lambda: torch.arange(7) * 0.1,
    "root": lambda: torch.arange(7).sqrt(),
    "cast": lambda: torch.arange(7).float() / 3,
    "cast to a dtype": lambda: torch.arange(7).to(torch.float32),
    "cast to the default": lambda: torch.ones(3, dtype=torch.float64).to(torch.get_default_dtype()),
    "chosen": lambda: torch.where(torch.tensor([True, False]), 0.0, -1.0),
    "chosen of fractions": lambda: torch.where(torch.tensor([True, False]), 0.1, -1.0),
    "chosen of both": lambda: torch.where(torch.tensor([True, False]), torch.arange(2), 0.1),
    "like": lambda: torch.zeros_like(torch.ones(2, dtype=torch.float64)),
    "new": lambda: torch.ones(2, dtype=torch.float64).new_zeros(2),
    "module": lambda: torch.cat([value.flatten() for value in nn.Linear(3, 2).parameters()]),
    "norm": lambda: nn.BatchNorm1d(3).running_mean,  # type: ignore[return-value,dict-item]
}


def _sparse(values: Any) -> Tensor:
    return torch.sparse_coo_tensor([[0, 1]], values, (3,), check_invariants=True).to_dense()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_default_dtype(name: str, dtype: torch.dtype) -> None:
    """A default dtype that is set while constructing gives what it gives in a process that has it."""
    make = VALUES[name]
    with alone():
        torch.manual_seed(2)
        torch.set_default_dtype(dtype)
        expected = make()
    with isolate_construction(2):
        torch.set_default_dtype(dtype)
        found = make()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)
    assert torch.get_default_dtype() == torch.zeros(1).dtype == torch.float32


def test_default_dtype_of_other_threads() -> None:
    """A default dtype that is set while constructing is that thread's, and gone when the module is made or is not."""
    with ThreadPoolExecutor(1) as pool:
        with isolate_construction(0):
            torch.set_default_dtype(torch.bfloat16)
            assert resnet18().conv1.weight.dtype == torch.bfloat16
            assert pool.submit(lambda: torch.full((1,), 1 / 3).dtype).result() == torch.float32
            assert pool.submit(torch.get_default_dtype).result() == torch.float32
            with pytest.raises(TypeError, match="floating-point"):
                torch.set_default_dtype(torch.int64)
        assert torch.get_default_dtype() == torch.zeros(1).dtype == torch.float32
        with pytest.raises(KeyError), isolate_construction(0):
            _fail(torch.float16)
    assert torch.get_default_dtype() == torch.zeros(1).dtype == torch.float32


@pytest.mark.parametrize("order", [slow("first"), slow("last")])
def test_compilers(order: str) -> None:
    """What torch compiles, exports and scripts elsewhere it also does where the file is imported, before or after."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.sources.compilers", order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _fail(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    raise KeyError
