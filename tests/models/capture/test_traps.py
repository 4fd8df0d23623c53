"""The ways in which hooks go wrong: each is walked into and shown to be wrong, then ours is shown to be right."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.errors import LayerNotReachedError
from layertap.models.hooks.attach import count_hooks
from layertap.models.loaded_model import LoadedModel
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import HookPoint, Reduction, Selector
from layertap.models.selection.plan import Capture
from layertap.models.selection.selectors import parse_selector
from tests.conftest import Loader
from tests.models.extraction import extract_captures, extract_plan
from tests.nets import Chain, EarlyExit, Swallows, batch, resnet, surveyed
from tests.oracle import record

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


# 1. In-place overwrite


@pytest.mark.parametrize("layer", ["bn1", "layer1.0.bn1", "layer1.0.bn2"])
def test_1_a_kept_reference_shows_a_later_value(load_fresh_net: Loader, layer: str) -> None:
    """A kept output is overwritten by an in-place ReLU or ``+=``; ours is not."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    truth = record(model.module, x)[layer, 0, (), "output"]
    with naive(model.module, [layer]) as found:
        model.module(x)
    assert not torch.equal(found[layer], truth)
    assert torch.equal(ours(model, x, layer)[layer], truth)


@pytest.mark.parametrize("layer", ["bn1", "layer1.0.bn1"])
def test_1_torchvisions_own_extractor(load_fresh_net: Loader, layer: str) -> None:
    """``create_feature_extractor`` gives a norm's output as the ReLU after it left it; ours does not."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    truth = record(model.module, x)
    graph = create_feature_extractor(model.module, {layer: "norm", "layer1": "later"})
    with torch.no_grad():
        found = graph(x)
    assert not torch.equal(found["norm"], truth[layer, 0, (), "output"])
    assert torch.equal(found["later"], truth["layer1", 0, (), "output"])
    assert torch.equal(ours(model, x, layer, "layer1")[layer], truth[layer, 0, (), "output"])


def test_1_inplace_off_is_not_enough(load_fresh_net: Loader) -> None:
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


def test_1_the_input_of_an_in_place_module(load_fresh_net: Loader) -> None:
    """A forward hook finds an in-place ReLU's input to be its output already, even if it copies; ours does not."""
    model = load_fresh_net("Chain")
    x = rows(model, 2)
    truth = record(model.module, x)
    seen: list[Tensor] = []
    handle = model.module.relu.register_forward_hook(lambda _, args, output: seen.append(args[0].clone()))  # type: ignore[union-attr]
    with torch.no_grad():
        model.module(x)
    handle.remove()
    assert torch.equal(seen[0], truth["relu", 0, (), "output"])
    assert not torch.equal(seen[0], truth["relu", 0, (), "input"])
    found = ours(model, x, "relu#0:input", "relu#0")
    assert torch.equal(found["relu#0:input"], truth["relu", 0, (), "input"])
    assert torch.equal(found["relu#0"], truth["relu", 0, (), "output"])


# 2. Shared modules


def test_2_a_module_that_runs_three_times(load_fresh_net: Loader) -> None:
    """By module name only the last of a bottleneck's three ReLU calls is left; ours keeps them apart."""
    model = load_fresh_net("bottlenecks")
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


# 3. Structured outputs


def test_3_outputs_that_are_no_tensor(load_fresh_net: Loader) -> None:
    """``output.clone()`` fails on a dictionary, and a look at its values misses what lies deeper; ours gives all."""
    model = load_fresh_net("Structured")
    x = rows(model, 2)
    with naive(model.module, ["nested"], lambda output: output.clone()), pytest.raises(AttributeError):
        model.module(x)
    with naive(model.module, ["nested"], lambda output: [v for v in output.values() if isinstance(v, Tensor)]) as found:
        model.module(x)
    seen = record(model.module, x).items()
    truth = {path: value for (name, _, path, site), value in seen if (name, site) == ("nested", "output")}
    assert len(found["nested"]) == 1
    assert len(truth) == 8
    taken = ours(model, x, "nested")
    assert len(taken) == 8
    for path, value in truth.items():
        assert torch.equal(taken["nested" + "".join(f"[{part}]" for part in path)], value)


# 4. Batch mates


def test_4_hooks_are_seen_by_every_forward_through_the_module() -> None:
    """On a shared model, a request that wanted two tensors gets two more from another thread's forward."""
    module = resnet().eval()
    together = threading.Barrier(2)
    received: dict[str, list[float]] = {"a": [], "b": []}

    def request(name: str, value: float) -> None:
        handles = [
            part.register_forward_hook(lambda _, args, output: received[name].append(float(args[0].mean())))
            for part in (module.conv1, module.bn1)
        ]
        together.wait()
        with torch.no_grad():
            module(torch.full((1, 3, 32, 32), value))
        together.wait()
        for handle in handles:
            handle.remove()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(request, ("a", "b"), (1.0, 2.0)))
    assert {name: len(values) for name, values in received.items()} == {"a": 4, "b": 4}
    assert {1.0, 2.0} <= set(received["a"])


def test_4_one_thread_for_each_module_and_a_collector_for_each_forward(load_fresh_net: Loader) -> None:
    """Requests that share a model run in its one thread, each with a collector of its own: each gets what it wanted."""
    model = load_fresh_net("resnet")
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


def test_4_replicas_share_weights_and_no_hooks() -> None:
    """Two module trees over the same parameters may run at once: the hooks of one are not on the other."""
    first = resnet().eval()
    second = copy.deepcopy(first, {id(value): value for value in (*first.parameters(), *first.buffers())})
    assert next(first.parameters()) is next(second.parameters())
    plan = make_plan([parse_selector("conv1"), parse_selector("layer1.0.relu#*")], surveyed(first, 3, 32, 32))
    inputs = [torch.full((1, 3, 32, 32), value) for value in (1.0, 2.0)]
    together = threading.Barrier(2)

    def request(module: nn.Module, x: Tensor) -> list[Tensor]:
        extractor = FeatureExtractor(module)

        def forward() -> object:
            together.wait()
            return module(x)

        taken = extract_captures(extractor, forward, plan.captures, 1)
        return [taken[result.capture].values for result in plan.results]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(request, (first, second), inputs))
    for values, x in zip(found, inputs, strict=True):
        truth = record(first, x)
        assert torch.equal(values[0], truth["conv1", 0, (), "output"])
        assert torch.equal(values[2], truth["layer1.0.relu", 1, (), "output"])


# 5. A hook that returns anything but None


def test_5_a_return_value_replaces_the_output(load_fresh_net: Loader) -> None:
    """A hook that returns False breaks a ResNet; with ours everywhere the model's own output is the same bits."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    with torch.no_grad():
        plain = model.module(x)
    handle = model.module.conv1.register_forward_hook(lambda _, args, output: isinstance(output, list))  # type: ignore[union-attr]
    with pytest.raises(AttributeError):
        model.module(x)
    handle.remove()
    found = ours(model, x, "*#*", "*#*:input", ".")
    assert len(found) > 90
    assert torch.equal(found["."], plain)


# 6. Exceptions leave hooks behind


def test_6_a_bad_name_midway(load_fresh_net: Loader) -> None:
    """Attaching in a loop leaves the hooks before the bad name for good; ours are gone, and a user's own are not."""
    model = load_fresh_net("resnet")
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
    missing = [
        *plan.captures,
        Capture(HookPoint("layer9", 0, (), "output"), plan.results[0].capture.info, Reduction()),
    ]
    with pytest.raises(KeyError):
        extract_captures(model.replicas[0].extractor, lambda: None, missing, 1)
    with pytest.raises(RuntimeError, match="expected input"):
        ours(model, torch.ones(1, 2, 8, 8), "bn1:input", "layer1")
    assert count_hooks(model.module) == 1
    own.remove()


def test_6_removing_all_hooks_takes_those_of_others() -> None:
    """Clearing a module's hooks takes a user's; ours remove their own."""
    module = Chain().eval()
    calls: list[int] = []
    module.conv.register_forward_hook(lambda _, args, output: calls.append(1))
    module.conv._forward_hooks.clear()
    module(torch.ones(1, 3, 8, 8))
    assert calls == []
    module.conv.register_forward_hook(lambda _, args, output: calls.append(1))
    plan = make_plan([parse_selector("conv")], surveyed(module, 3, 8, 8))
    calls.clear()
    extract_captures(FeatureExtractor(module), lambda: module(torch.ones(1, 3, 8, 8)), plan.captures, 1)
    module(torch.ones(1, 3, 8, 8))
    assert calls == [1, 1]


# 7. Stopping early


class Stop(Exception):  # noqa: N818
    """What people raise to end a forward."""


def test_7_a_model_that_catches_exceptions(load_fresh_net: Loader) -> None:
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
    assert torch.equal(ours(model, x, "head")["head"], record(module.head, x)[".", 0, (), "output"])
    assert module.tails == before + 1


def test_7_the_last_name_listed_is_not_the_last_to_run(load_fresh_net: Loader) -> None:
    """Ending at the last name of the list loses what runs after it; ours ends when nothing is pending."""
    model = load_fresh_net("resnet")
    x = rows(model, 1)
    names = ["layer2", "bn1"]

    def until_last(output: Tensor) -> Tensor:
        if len(found) == 0:  # bn1 comes first, and it is the last of the list
            found["bn1"] = output.clone()
            raise Stop
        return output.clone()

    with naive(model.module, names, until_last) as found, pytest.raises(Stop):
        model.module(x)
    assert found.keys() == {"bn1"}
    truth = record(model.module, x)
    taken = ours(model, x, *names)
    assert list(taken) == names
    assert all(torch.equal(taken[name], truth[name, 0, (), "output"]) for name in names)


def test_7_nothing_runs_after_the_last_point(load_fresh_net: Loader) -> None:
    """A hook alone lets the rest of the model run; ours leaves when the last point is there."""
    model = load_fresh_net("resnet")
    x = rows(model, 1)
    begun: list[str] = []
    handle = model.module.layer4.register_forward_pre_hook(lambda _, args: begun.append("layer4"))  # type: ignore[union-attr]
    with naive(model.module, ["layer3"]):
        model.module(x)
    assert begun == ["layer4"]
    ours(model, x, "conv1", "layer3", "layer4:input")
    assert begun == ["layer4", "layer4"]
    ours(model, x, "layer3", "conv1")
    assert begun == ["layer4", "layer4"]
    handle.remove()


def test_7_a_point_that_is_never_reached(load_fresh_net: Loader) -> None:
    """A dictionary simply lacks a layer that this input did not reach; ours says so."""
    model = load_fresh_net("EarlyExit")
    assert isinstance(model.module, EarlyExit)
    x = torch.full((1, 4), 1e6)
    with naive(model.module, ["first", "second"]) as found:
        model.module(x)
    assert found.keys() == {"first"}
    with pytest.raises(LayerNotReachedError, match="second"):
        ours(model, x, "first", "second")


# 13. Layouts


def test_13_channels_are_not_always_second(load_fresh_net: Loader) -> None:
    """The mean over axes 2 and 3 of a Swin layer is a mean over width and channels; ours is over the map."""
    model = load_fresh_net("swin")
    x = rows(model, 2)
    truth = record(model.module, x)["features.1", 0, (), "output"]
    assert truth.shape == (2, 8, 12, 24)
    wrong = truth.mean((2, 3))
    found = ours(model, x, "features.1", pool="mean")["features.1"]
    assert wrong.shape != found.shape
    torch.testing.assert_close(found, truth.mean((1, 2)))


def test_13_prefix_tokens(load_fresh_net: Loader) -> None:
    """The mean over a transformer's tokens takes in the class token; ours leaves it out, and gives it as ``cls``."""
    model = load_fresh_net("vit")
    x = rows(model, 2)
    truth = record(model.module, x)["encoder", 0, (), "output"]
    found = ours(model, x, "encoder", pool="mean")["encoder"]
    assert not torch.allclose(truth.mean(1), found, atol=1e-3)
    torch.testing.assert_close(found, truth[:, 1:].mean(1))
    assert torch.equal(ours(model, x, "encoder", pool="cls")["encoder"], truth[:, 0])


def test_13_rows_are_not_always_first(load_fresh_net: Loader) -> None:
    """``output[row]`` of attention that runs (T, N, C) is a token of all rows; ours knows where the rows are."""
    model = load_fresh_net("TimeFirst")
    x = rows(model, 5)
    truth = record(model.module, x)["attention", 0, ("0",), "output"]
    assert truth.shape == (5, 5, 8)
    found = ours(model, x, "attention[0]", pool="flatten")["attention[0]"]
    for row in range(5):
        assert not torch.equal(truth[row].flatten(), found[row])
        assert torch.equal(truth[:, row].flatten(), found[row])


def test_13_windows_are_not_rows(load_fresh_net: Loader) -> None:
    """Windows folded into the batch axis make ``output[row]`` a window of the first row; ours counts them together."""
    model = load_fresh_net("Windows")
    x = rows(model, 3)
    truth = record(model.module, x)["inner", 0, (), "output"]
    assert truth.shape == (12, 2, 6)
    found = ours(model, x, "inner", pool="mean")["inner"]
    assert found.shape == (3, 6)
    assert not torch.allclose(found[1], truth[1].mean(0), atol=1e-3)
    torch.testing.assert_close(found[1], truth[4:8].mean((0, 1)))


# 14. A slice pins its whole storage


def test_14_a_class_token_kept_as_a_view(load_fresh_net: Loader) -> None:
    """A class token kept as a slice holds the memory of all tokens; ours holds its own size."""
    model = load_fresh_net("vit")
    x = rows(model, 2)
    with naive(model.module, ["encoder"], lambda output: output[:, 0]) as found:
        model.module(x)
    view = found["encoder"]
    assert view.untyped_storage().nbytes() == 17 * view.nbytes
    taken = ours(model, x, "encoder", pool="cls")["encoder"]
    assert torch.equal(taken, view)
    assert taken.untyped_storage().nbytes() == taken.nbytes


# 15. bfloat16 has no numpy type; channels_last is not contiguous


def test_15_bfloat16_and_numpy(load_fresh_net: Loader) -> None:
    """``numpy()`` refuses bfloat16; ours come as float32 with the same values."""
    model = load_fresh_net("resnet", dtype="bfloat16")
    x = rows(model, 2)
    with naive(model.module, ["layer1"], lambda output: output.clone()) as found:
        model.module(x.bfloat16())
    with pytest.raises(TypeError):
        found["layer1"].numpy()
    taken = ours(model, x, "layer1")["layer1"].numpy()
    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, found["layer1"].float().numpy())


def test_15_channels_last(load_fresh_net: Loader) -> None:
    """The bytes of a channels_last tensor are not in C order; ours are."""
    model = load_fresh_net("resnet")
    model.module.to(memory_format=torch.channels_last)
    x = rows(model, 2).contiguous(memory_format=torch.channels_last)
    with naive(model.module, ["layer1"], lambda output: output.clone()) as found:
        model.module(x)
    array = found["layer1"].numpy()
    assert not array.flags.c_contiguous
    taken = ours(model, x, "layer1")["layer1"].numpy()
    assert taken.flags.c_contiguous
    np.testing.assert_array_equal(taken, array)
    assert np.frombuffer(taken.tobytes(), np.float32)[1] == array[0, 0, 0, 1]


# 16. Tied modules vanish


def test_16_tied_modules(load_fresh_net: Loader) -> None:
    """A plain walk over the modules does not know the second name of a tied one; ours gives it under both."""
    model = load_fresh_net("Tied")
    x = rows(model, 2)
    assert "decode" not in dict(model.module.named_modules())
    with pytest.raises(KeyError), naive(model.module, ["decode"]):
        pass
    found = ours(model, x, "decode", "encode#0")
    truth = record(model.module, x)
    assert torch.equal(found["decode"], truth["decode", 1, (), "output"])
    assert torch.equal(found["encode#0"], truth["encode", 0, (), "output"])


# 17. Graph names are not module names


def test_17_a_traced_name(load_fresh_net: Loader) -> None:
    """A traced transformer's ``ln_1`` is the module ``ln_2``: torchvision's extractor gives another layer; ours not."""
    model = load_fresh_net("vit")
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
