"""What goes wrong with compiled modules and with batches: walked into and shown to be wrong, then ours shown right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.errors import LoadError
from layertap.models.planner import make_plan
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.models.capture.test_traps import naive, ours, rows
from tests.nets import Tied
from tests.oracle import record, seeded

# 12. Compiled modules ignore hooks added later


class Two(nn.Module):
    """A part within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded(Tied(), 1)
        self.head = seeded(nn.Linear(5, 2), 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def compiled(function: Any) -> Any:
    """By the backend that only traces."""
    return torch.compile(function, backend="eager")


class Decorated(Two):
    """Its forward is compiled by its class."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Function(Two):
    """Compiles a function in which no module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.double = compiled(lambda x: x.tanh() * 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.double(self.body(x)))
        return out


def whole() -> nn.Module:
    module: nn.Module = compiled(Two())
    return module


def part() -> nn.Module:
    net = Two()
    net.body = compiled(net.body)
    return net


def in_place() -> nn.Module:
    net = Two()
    net.body.compile(backend="eager")
    return net


def method() -> nn.Module:
    net: Any = Two()
    net.forward = compiled(net.forward)
    return net  # type: ignore[no-any-return]


def never() -> nn.Module:
    net: Any = Two()
    net.body = torch.compiler.disable(net.body)
    return net  # type: ignore[no-any-return]


def spec(factory: str) -> ModelSpec:
    source = f"python:tests.models.capture.test_traps_forwards:{factory}"
    return ModelSpec("net", source, device="cpu", inputs=(InputSpec("x", (5,)),))


@pytest.fixture
def _fresh() -> Iterator[None]:
    """No trace of what other tests compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("make", [whole, part, in_place, method, Decorated])
def test_12_hooks_on_what_is_compiled(make: Callable[[], nn.Module]) -> None:
    """A hook added to a module that has run compiled never runs; ours refuses the model when it is loaded."""
    net = make().eval()
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    name = next(name for name, each in net.named_modules() if name.endswith(("body.act", "mod.act")))
    with torch.no_grad():
        net(x)
    with naive(net, [name]) as found:
        net(x)
    assert found == {}
    with pytest.raises(LoadError, match="is compiled") as caught:
        load_model(spec(make.__name__))
    assert "without torch.compile" in caught.value.hint


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("make", [Two, Function, never])
def test_12_what_hides_no_module_is_taken(make: Callable[[], nn.Module]) -> None:
    """A compiled function without modules in it does no harm: every layer is there, before and after plain forwards."""
    model = load_model(spec(make.__name__), replicas=2)
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    plain = Two().eval()
    truth = record(plain, x)
    with torch.no_grad():
        for each in model.replicas:
            each.module(x)
    body = "body._orig_mod" if make is never else "body"
    names = [f"{body}.act", f"{body}.encode#0", "head:input"]
    found = ours(model, x, *names)
    torch.testing.assert_close(found[names[0]], truth["body.act", 0, (), "output"])
    torch.testing.assert_close(found[names[1]], truth["body.encode", 0, (), "output"])
    given = truth["head", 0, (), "input"]
    torch.testing.assert_close(found["head:input"], given.tanh() * 2 if make is Function else given)


# 18. Batch size changes last bits


def test_18_bits_depend_on_the_number_of_rows(load_fresh_net: Loader) -> None:
    """A row alone and among others differs in its last bits; in a forward of one size it never does."""
    model = load_fresh_net("vit")
    x = rows(model, 8)
    with torch.no_grad():
        alone, together = model.module(x[:1]), model.module(x)[:1]
        sizes = [model.module(x[:count])[:1] for count in range(1, 9)]
    torch.testing.assert_close(alone, together)
    assert not all(torch.equal(alone, each) for each in sizes)
    plan = make_plan([parse_selector("encoder"), parse_selector(".")], model.catalog)

    def among(others: Tensor, place: int) -> list[Tensor]:
        """The row's results in a forward of 8 rows, at a place among others'."""
        pieces = [others[:place], x[:1], others[place:7]]
        ends = [place, place + 1, 8]
        share = RequestSlice(ends[0], ends[1], plan.captures)
        taken = model.run(model.replicas[0], [{"x": piece} for piece in pieces if len(piece)], [share])
        return [reduced.values for reduced in taken.select(share).values()]

    first = among(x[1:], 0)
    for seed in range(1, 4):
        for place in (0, 3, 7):
            mates = rows(model, 7, seed) * 10.0**seed
            assert all(torch.equal(*pair) for pair in zip(first, among(mates, place), strict=True))
    padded = RequestSlice(0, 1, plan.captures)
    filled = model.run(model.replicas[0], [{"x": x[:1]}], [padded], padded_rows=8).select(padded).values()
    assert all(torch.equal(one, other.values) for one, other in zip(first, filled, strict=True))


# 19. Row-wise only


@pytest.mark.parametrize("name", ["BatchCentred", "BatchScaled", "Backwards"])
def test_19_rows_that_affect_each_other(load_fresh_net: Loader, name: str) -> None:
    """A row's features among others are not its own; ours runs such a model one row at a time."""
    model = load_fresh_net(name)
    x = rows(model, 3)
    alone = [record(model.module, x[row : row + 1])[".", 0, (), "output"] for row in range(3)]
    with naive(model.module, [""]) as found:
        model.module(x)
    assert not torch.allclose(found[""], torch.cat(alone), atol=1e-3)
    assert model.catalog.crosses_rows
    taken = ours(model, x, ".")["."]
    for row in range(3):
        torch.testing.assert_close(taken[row : row + 1], alone[row])


def test_19_axis_0_is_not_rows(load_fresh_net: Loader) -> None:
    """``output[row]`` of a model that returns (T, N, C) is a token of all rows; ours gives each request its own."""
    model = load_fresh_net("TimeOut")
    x = rows(model, 5)
    with naive(model.module, [""]) as found:
        model.module(x)
    plan = make_plan([parse_selector(".")], model.catalog)
    shares = [RequestSlice(0, 2, plan.captures), RequestSlice(2, 5, plan.captures)]
    taken = model.run(model.replicas[0], [{"x": x[:2]}, {"x": x[2:]}], shares)
    for share in shares:
        (value,) = (reduced.values for reduced in taken.select(share).values())
        own = record(model.module, x[share.start : share.stop])[".", 0, (), "output"]
        assert found[""][share.start : share.stop].shape != own.shape
        torch.testing.assert_close(value, own)
