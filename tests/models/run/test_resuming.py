"""Forwards that go on from a layer's output, against plain forwards in which a hook puts that output there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layertap.models.errors import InputError, RequestError, SelectorError
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import verify_resumption
from layertap.models.run.resumption import Resumption, find_start, verify_resumable
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import net_spec
from tests.loading import load_model
from tests.models.extraction import see
from tests.nets import batch
from tests.oracle import Key, record

ROWS = 2
ROW = InputSpec("x", (4,))


def resumed(model: LoadedModel, layer: str) -> Resumption:
    return verify_resumption(model, find_start(parse_selector(layer), model.catalog), model.shapes)


def plan_of(known: Resumption, *texts: str, objective: Objective | None = None) -> Plan:
    return make_plan([Selector(**vars(parse_selector(text))) for text in texts], known.catalog, (), objective)


def ours(model: LoadedModel, known: Resumption, given: Tensor, plan: Plan, replica: int = 0) -> dict[str, Tensor]:
    share = RequestSlice(0, len(given), plan.captures, plan.resolved_interventions, plan.objective)
    taken = model.run(model.replicas[replica], [{"given": given}], [share], None, known).select(share)
    return {result.key: taken[result.capture].values for result in plan.results}


def points(known: Resumption) -> set[Key]:
    """Every tensor that the resumed catalog offers."""
    return {
        (layer.name, number, info.path, site)
        for layer in known.catalog.layers.values()
        for number, call in enumerate(layer.calls)
        for site, moment in (("input", call.input), ("output", call.output))
        for info in moment.tensors
    }


@contextmanager
def put(module: nn.Module, layer: str, call: int, value: Tensor) -> Iterator[None]:
    """A plain hook that returns something else from one call of a layer."""
    numbers, running = iter(range(1000)), list[int]()

    def begin(part: nn.Module, args: Any) -> None:
        running.append(next(numbers))

    def end(part: nn.Module, args: Any, output: Any) -> Tensor | None:
        return value.clone() if running.pop() == call else None

    part = module.get_submodule(layer)
    with part.register_forward_pre_hook(begin), part.register_forward_hook(end):
        yield


def offline(model: LoadedModel, layer: str, call: int, value: Tensor, seed: int) -> dict[Key, Tensor]:
    """All tensors of a whole forward of some rows, with another value put in place of what leaves a call."""
    rows = batch(model.inputs, len(value), seed)
    with put(model.module, layer, call, value):
        return see(model, rows)


CASES = [
    ("resnet", "layer3.0"),
    ("bottlenecks", "layer2.0.relu#0"),
    ("vit", "encoder.layers.encoder_layer_0"),
    ("swin", "features.2"),
    *[("Chain", layer) for layer in ("conv", "relu#0", "relu")],
    *[("Tied", layer) for layer in ("encode#0", "act", "encode")],
    *[("Keywords", layer) for layer in ("linear", "gate#0", "embed")],
    *[("Recursive", "down#2"), ("EarlyExit", "first"), ("Encoder", "layers.layers.0")],
]


@pytest.fixture(scope="module")
def loaded() -> Callable[[str], LoadedModel]:
    """Each model once."""
    return cache(lambda net: load_model(net_spec(net), 2))


@pytest.mark.parametrize(("net", "layer"), CASES)
def test_what_follows(loaded: Callable[[str], LoadedModel], net: str, layer: str) -> None:
    """Offered is just what is the same whatever the model's inputs were; it has the numbers of a plain forward."""
    model = loaded(net)
    known = resumed(model, layer)
    point = known.start.point
    given = torch.randn(ROWS, *known.takes.shape, generator=torch.Generator().manual_seed(5))
    one, other = (offline(model, point.layer, point.call, given, seed) for seed in (1, 2))
    offered = points(known)
    own = (point.layer, point.call, point.path, "output")
    later = {key for key in one if key in other and one[key].is_floating_point()}
    follows = {key for key in later if torch.equal(one[key], other[key])}
    wanted = {key for key in offered if one[key].is_floating_point()}
    assert own in offered
    assert wanted <= follows
    # What is a constant of the model, or stands before the layer and depends on no input, is not missed.
    assert {key for key in follows - wanted if ordered(model, key) > ordered(model, own)} == set()
    found = ours(model, known, given, plan_of(known, *(spelled(key) for key in sorted(wanted))))
    for key in wanted:
        torch.testing.assert_close(found[spelled(key)], one[key], rtol=1e-5, atol=1e-6)


def ordered(model: LoadedModel, key: Key) -> int:
    call = model.catalog.layers[key[0]].calls[key[1]]
    return (call.output if key[3] == "output" else call.input).order


def spelled(key: Key) -> str:
    return f"{key[0]}#{key[1]}{''.join(f'[{part}]' for part in key[2])}:{key[3]}"


class Counting(TorchDispatchMode):
    """Counts multiplications of matrices and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func._schema.name in ("aten::convolution", "aten::addmm", "aten::mm", "aten::bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("net", "layer", "left"), [("bottlenecks", "layer3", 5), ("vit", "encoder.dropout", 9)])
def test_only_the_rest_runs(loaded: Callable[[str], LoadedModel], net: str, layer: str, left: int) -> None:
    """Nothing that comes before the layer is computed, nor anything after what is wanted."""
    model = loaded(net)
    known = resumed(model, layer)
    given = torch.randn(1, *known.takes.shape)
    with Counting() as whole:
        model.module(*batch(model.inputs, 1).values())
    with Counting() as rest:
        ours(model, known, given, plan_of(known, "."))
    assert rest.found == left < whole.found
    with Counting() as nothing:
        ours(model, known, given, plan_of(known, layer))
    assert nothing.found == 0


def test_nothing_stays(loaded: Callable[[str], LoadedModel]) -> None:
    """No forward of a part is replaced for longer than a forward takes, whether it ends, raises or stops early."""
    model = loaded("resnet")
    known = resumed(model, "layer2")
    before = {name: vars(part).get("forward") for name, part in model.module.named_modules()}
    given = torch.randn(2, *known.takes.shape)
    ours(model, known, given, plan_of(known, "layer3"))
    ours(model, known, given, plan_of(known, "."))
    with put(model.module, "layer4", 0, torch.randn(1)), pytest.raises(InputError):
        ours(model, known, given, plan_of(known, "."))
    assert {name: vars(part).get("forward") for name, part in model.module.named_modules()} == before
    assert set(before.values()) == {None}
    assert model.hooks == 0


@pytest.mark.parametrize(
    ("net", "layer", "says"),
    [
        ("Windows", "inner", "one entry for each input"),
        ("Structured", "nested", "does not name the output"),
        ("Recursive", "down#1", "can't be resumed"),
    ],
)
def test_refused(loaded: Callable[[str], LoadedModel], net: str, layer: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        resumed(loaded(net), layer)


def test_what_hangs_on_more_is_refused(loaded: Callable[[str], LoadedModel]) -> None:
    """Inside a residual block the sum needs the block's input too; so does everything after it."""
    model = loaded("resnet")
    known = resumed(model, "layer3.0.conv1")
    plan_of(known, "layer3.0.conv2", "layer3.0.bn2")
    for text in ("layer3.0", "layer4", ".", "layer1", "layer3:input", "layer3.0.conv1:input"):
        with pytest.raises(RequestError, match=r"does not follow from the output of 'layer3.0.conv1' alone"):
            plan_of(known, text)
    names = {result.key for result in plan_of(known, "layer*").results}
    assert names == {"layer3.0.conv1", "layer3.0.bn1", "layer3.0.conv2", "layer3.0.bn2"}


def own(factory: str, row: InputSpec = ROW) -> ModelSpec:
    return ModelSpec(factory, f"python:{__name__}:{factory}", weights="random:0", inputs=(row,), device="cpu")


class Large(nn.Module):
    """Whether a row is very large: False for any that a trial is made with."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) > 1e4


class Masks(nn.Module):
    """Leaves out what a part's mask says, in three ways; a mask has no NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.first, self.plain = Large(), nn.Linear(4, 4), nn.Linear(4, 2)
        self.filled, self.chosen, self.read = (nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mask = self.large(x)
        x = self.first(x)
        filled = self.filled(x.masked_fill(mask, 0.0))
        chosen = self.chosen(torch.where(mask, 0.0, x))
        like = torch.zeros_like(mask, dtype=torch.float32)  # only its shape counts
        return self.plain(x + like), filled, chosen, self.read(x * 2 if mask.any() else x)


def test_masks_and_whole_numbers_are_no_answer() -> None:
    """What depends on a mask that is false in every trial is not offered; what depends on its shape only, is."""
    model = load_model(own("Masks"))
    known = resumed(model, "first")
    large, plain = torch.full((1, 4), 2e4), torch.ones(1, 4)
    given = model.module.get_submodule("first")(plain)
    found = []
    for x in (plain, large):
        with put(model.module, "first", 0, given):
            found.append(record(model.module, x))
    one, other = found
    differ = {key[0] for key in one if key[3] == "output" and not torch.equal(one[key], other[key])}
    assert differ == {"large", ".", "filled", "chosen", "read"}
    offered = {layer for layer, _, _, site in points(known) if site == "output"}
    assert offered == {"first", "plain"}


class Lists(nn.Module):
    """Goes on by what Python reads of a part's mask as a list, which no operation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.first, self.second = Large(), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.large(x)
        x = self.first(x)
        return self.second(x * 2 if [True] in mask.tolist() else x)


def test_lists_are_read_too() -> None:
    """What follows a list that Python has read of what was left out is not offered."""
    known = resumed(load_model(own("Lists")), "first")
    assert {layer for layer, _, _, site in points(known) if site == "output"} == {"first"}


class Keeps(nn.Linear):
    """Keeps what it returned last."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Remembers(nn.Module):
    """Goes on with what a part kept on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.first, self.second = Keeps(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.second(self.first(self.early(x)))
        return x, x + self.early.kept


def test_what_parts_keep() -> None:
    """A model that goes on with what its parts kept of a forward is not resumed: that is of other rows."""
    with pytest.raises(SelectorError, match="can't be resumed"):
        resumed(load_model(own("Remembers")), "first")


class MakesConstants(nn.Module):
    """Makes tensors of numbers where what depended on the input has just been let go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(sum(x * factor for factor in range(6)))
        ones = [torch.tensor([[1.0] * 64] * len(x)) for _ in range(8)]
        return self.second(x * sum(ones))


def test_reused_memory_is_no_dependence() -> None:
    """Every trial of one layer ends alike, wherever the tensors of its forwards happen to be."""
    model = load_model(own("MakesConstants", InputSpec("x", (64,))))
    start = find_start(parse_selector("first"), model.catalog)
    rows = batch(model.inputs, 3)
    kept = []
    for trial in range(30):
        kept.append(torch.zeros(trial % 13 * 64 + 1))
        known = verify_resumable(model.module, start, model.catalog, model.inputs, model.replicas[0], rows, model.dtype)
        assert {layer for layer, *_ in points(known)} == {".", "first", "second"}
