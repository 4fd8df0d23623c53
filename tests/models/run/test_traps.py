"""The ways in which hooks go wrong: each test shows the usual hook to be wrong, and ours to be right.

More are in `../gradients/test_traps_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from layertap.models.hooks.attach import count_hooks
from layertap.models.plan.plan import Capture
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import Point
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.models.extraction import extract_captures, extract_plan
from tests.nets import Swallows, Tied, batch
from tests.oracle import record, seeded

Found = dict[str, Any]


def ours(model: LoadedModel, x: Tensor, *texts: str, **how: Any) -> dict[str, Tensor]:
    """The project's answer, by key."""
    selectors = [Selector(**{**vars(parse_selector(text)), "reduction": Reduction(**how)}) for text in texts]
    plan = make_plan(selectors, model.catalog)
    taken = extract_plan(model, {"x": x}, plan, model.catalog, 64)
    return {result.key: taken[result.capture].values for result in plan.results}


@contextmanager
def naive(module: nn.Module, names: list[str], keep: Callable[[Any], Any] = lambda output: output) -> Iterator[Found]:
    """The usual dictionary of outputs by module name."""
    found: Found = {}
    parts = dict(module.named_modules())

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def store(_: nn.Module, args: Any, output: Any) -> None:
            found[name] = keep(output)

        return store

    handles = [parts[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            yield found
    finally:
        for handle in handles:
            handle.remove()


def rows(model: LoadedModel, count: int, seed: int = 0) -> Tensor:
    return batch(model.inputs, count, seed)["x"]


# In-place overwrite


def test_inplace_off_is_not_enough(load_fresh_net: Loader) -> None:
    """With every ``inplace`` off, ``out += identity`` still writes over what ``bn2`` returned."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    truth = record(model.module, x)["layer1.0.bn2", 0, (), "output"]
    for part in model.module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    with naive(model.module, ["layer1.0.bn2"]) as found:
        model.module(x)
    assert not torch.equal(found["layer1.0.bn2"], truth)
    assert torch.equal(ours(model, x, "layer1.0.bn2")["layer1.0.bn2"], truth)


def test_the_input_of_an_in_place_module(load_net: Loader) -> None:
    """A forward hook finds an in-place ReLU's input to be its output already, even if it copies; ours does not."""
    model = load_net("Chain")
    x = rows(model, 2)
    truth = record(model.module, x)
    seen: list[Tensor] = []
    handle = model.module.relu.register_forward_hook(lambda _, args, output: seen.append(args[0].clone()))
    with torch.no_grad():
        model.module(x)
    handle.remove()
    assert torch.equal(seen[0], truth["relu", 0, (), "output"])
    assert not torch.equal(seen[0], truth["relu", 0, (), "input"])
    found = ours(model, x, "relu#0:input", "relu#0")
    assert torch.equal(found["relu#0:input"], truth["relu", 0, (), "input"])
    assert torch.equal(found["relu#0"], truth["relu", 0, (), "output"])


# Shared modules


def test_a_module_that_runs_three_times(load_net: Loader) -> None:
    """By module name only the last of a bottleneck's three ReLU calls is left; ours keeps them apart."""
    model = load_net("bottlenecks")
    x = rows(model, 2)
    truth = record(model.module, x)
    name = "layer1.0.relu"
    with naive(model.module, [name], lambda output: output.clone()) as found:
        model.module(x)
    assert found.keys() == {name}
    assert found[name].shape != truth[name, 0, (), "output"].shape
    taken = ours(model, x, f"{name}#*", f"{name}#-2", name)
    for call in range(3):
        assert torch.equal(taken[f"{name}#{call}"], truth[name, call, (), "output"])
    assert torch.equal(taken[f"{name}#-2"], taken[f"{name}#1"])
    assert torch.equal(taken[name], taken[f"{name}#2"])


# Batch mates


def test_one_thread_for_each_module_and_an_extractor_for_each_forward(load_net: Loader) -> None:
    """Requests that share a model run in its one thread, each with its own extractor: each gets what it wanted."""
    model = load_net("resnet")
    inputs = [rows(model, 2, seed) for seed in range(6)]
    wanted = [("conv1", "bn1"), ("bn1:input", "layer1"), ("fc", "conv1")] * 2
    truth = [record(model.module, x) for x in inputs]
    with ThreadPoolExecutor(1) as owner, ThreadPoolExecutor(4) as clients:
        futures = clients.map(lambda x, texts: owner.submit(ours, model, x, *texts).result(), inputs, wanted)
        for found, texts, seen in zip(futures, wanted, truth, strict=True):
            assert tuple(found) == texts
            for text in texts:
                name, _, site = text.partition(":")
                assert torch.equal(found[text], seen[name, 0, (), site or "output"])


# A hook that returns anything but None


def test_a_return_value_replaces_the_output(load_net: Loader) -> None:
    """A hook that returns False breaks a ResNet; with ours everywhere the model's own output is the same bits."""
    model = load_net("resnet")
    x = rows(model, 2)
    with torch.no_grad():
        plain = model.module(x)
    handle = model.module.conv1.register_forward_hook(lambda _, args, output: isinstance(output, list))
    with pytest.raises(AttributeError):
        model.module(x)
    handle.remove()
    found = ours(model, x, "*#*", "*#*:input", ".")
    assert len(found) > 90
    assert torch.equal(found["."], plain)


# Exceptions leave hooks behind


def test_a_bad_name_midway(load_net: Loader) -> None:
    """Attaching in a loop leaves the hooks before the bad name for good; ours are gone, and a user's own are not."""
    model = load_net("resnet")
    parts = dict(model.module.named_modules())
    left = []

    def attach() -> None:
        for name in ("conv1", "bn1", "layer9"):
            left.append(parts[name].register_forward_hook(print))

    with pytest.raises(KeyError):
        attach()
    assert count_hooks(model.module) == len(left) == 2
    for handle in left:
        handle.remove()
    own = model.module.register_forward_hook(lambda _, args, output: None)
    plan = make_plan([parse_selector("conv1"), parse_selector("bn1:input")], model.catalog)
    missing = [*plan.captures, Capture(Point("layer9", 0, (), "output"), plan.results[0].capture.info, Reduction())]
    with pytest.raises(KeyError):
        extract_captures(model.replicas[0].modules, lambda: None, missing, 1)
    with pytest.raises(RuntimeError, match="expected input"):
        ours(model, torch.ones(1, 2, 8, 8), "bn1:input", "layer1")
    assert count_hooks(model.module) == 1
    own.remove()


# Stopping early


class Stop(Exception):  # noqa: N818
    """What people raise to end a forward."""


def test_a_model_that_catches_exceptions(load_fresh_net: Loader) -> None:
    """An Exception that is to end the forward is caught by the model, which runs on; ours ends it."""
    model = load_fresh_net("Swallows")
    module, x = model.module, rows(model, 1)
    assert isinstance(module, Swallows)

    def stop(_: nn.Module, args: Any, output: Any) -> None:
        raise Stop

    handle = module.head.register_forward_hook(stop)
    before = module.tails
    module(x)
    handle.remove()
    assert module.tails == before + 1
    model.replicas[0].take()  # of tails that ran within ours nothing would stay
    ran: list[nn.Module] = []
    handle = module.tail.register_forward_hook(lambda part, args, output: ran.append(part))
    assert torch.equal(ours(model, x, "head")["head"], record(module.head, x)[".", 0, (), "output"])
    handle.remove()
    assert not ran


def test_nothing_runs_after_the_last_point(load_net: Loader) -> None:
    """A hook alone lets the rest of the model run; ours leaves when the last point is there."""
    model = load_net("resnet")
    x = rows(model, 1)
    begun: list[str] = []
    handle = model.module.layer4.register_forward_pre_hook(lambda _, args: begun.append("layer4"))
    with naive(model.module, ["layer3"]):
        model.module(x)
    assert begun == ["layer4"]
    ours(model, x, "conv1", "layer3", "layer4:input")
    assert begun == ["layer4", "layer4"]
    ours(model, x, "layer3", "conv1")
    assert begun == ["layer4", "layer4"]
    handle.remove()


# Graph names are not module names


def test_a_traced_name(load_net: Loader) -> None:
    """A traced transformer's ``ln_1`` is the module ``ln_2``: torchvision's extractor gives another layer; ours not."""
    model = load_net("vit")
    x = rows(model, 2)
    name = "encoder.layers.encoder_layer_0.ln_1"
    assert name in get_graph_node_names(model.module)[1]
    truth = record(model.module, x)
    graph = create_feature_extractor(model.module, {name: "it"})
    with torch.no_grad():
        traced = graph(x)["it"]
    assert not torch.allclose(traced, truth[name, 0, (), "output"], atol=1e-3)
    torch.testing.assert_close(traced, truth[name.replace("ln_1", "ln_2"), 0, (), "output"])
    assert torch.equal(ours(model, x, name)[name], truth[name, 0, (), "output"])


# A module may have two names


def test_both_names_of_a_tied_module(load_net: Loader) -> None:
    """Each name of a module stands for all of its calls; ``named_modules`` knows only the first."""
    model = load_net("Tied")
    x = rows(model, 2)
    assert "decode" not in dict(model.module.named_modules())
    truth = record(model.module, x)
    found = ours(model, x, "encode#0", "encode#1", "decode#0", "decode#1")
    assert len(found) == 4
    for key, values in found.items():
        layer, _, call = key.partition("#")
        assert torch.equal(values, truth[layer, int(call), (), "output"])


# Compiled modules ignore hooks added later


class Two(nn.Module):
    """A part within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded(Tied(), 1)
        self.head = seeded(nn.Linear(5, 2), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def compiled(function: Any) -> Any:
    """By the backend that only traces."""
    return torch.compile(function, backend="eager")


def whole() -> nn.Module:
    return compiled(Two())


def in_place() -> nn.Module:
    net = Two()
    net.body.compile(backend="eager")
    return net


def spec(factory: str) -> ModelSpec:
    source = f"python:{__name__}:{factory}"
    return ModelSpec("net", source, device="cpu", inputs=(InputSpec("x", (5,)),))


@pytest.fixture
def _fresh() -> Iterator[None]:
    """No trace of what other tests compiled, and a compiler that nothing has told to rest."""
    torch.compiler.reset()
    torch.compiler.set_stance("default")
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("make", [whole, in_place])
def test_hooks_on_what_is_compiled(make: Callable[[], nn.Module]) -> None:
    """A hook added to a module that has run compiled never runs; a served model is not compiled, so that ours do."""
    net = make().eval()
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    name = next(name for name, each in net.named_modules() if name.endswith(("body.act", "mod.act")))
    with torch.no_grad():
        net(x)
    with naive(net, [name]) as found:
        net(x)
    assert found == {}
    model = load_model(spec(make.__name__))
    plan = make_plan([parse_selector(name)], model.catalog)
    ((capture, given),) = extract_plan(model, {"x": x}, plan, model.catalog, 2).items()
    with torch.no_grad(), naive(model.module, [name]) as found:
        model.module(x)
    assert torch.equal(given.values, found[capture.point.layer])


# Batch size changes last bits


def test_bits_depend_on_the_number_of_rows(load_net: Loader) -> None:
    """A row alone and among others differs in its last bits; in a forward of one size it never does."""
    model = load_net("vit")
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
    for place in (0, 3, 7):
        mates = rows(model, 7, seed=place + 1) * 10.0**place
        assert all(torch.equal(*pair) for pair in zip(first, among(mates, place), strict=True))
    padded = RequestSlice(0, 1, plan.captures)
    filled = model.run(model.replicas[0], [{"x": x[:1]}], [padded], padded_rows=8).select(padded).values()
    assert all(torch.equal(one, other.values) for one, other in zip(first, filled, strict=True))
