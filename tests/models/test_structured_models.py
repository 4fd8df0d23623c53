"""Models of every structure: each value, gradient and change against hooks that know nothing of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from layertap.models.errors import InputError, RequestError
from layertap.models.loaded_model import LoadedModel
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Intervention, Objective, Operation, Reduction, Selector
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec, ModelSpec
from tests.loading import load_model
from tests.models.extraction import extract_plan
from tests.nets import INPUTS, batch
from tests.oracle import Key, Path, flatten, record, seeded

HERE, NETS = "tests.models.test_structured_models", "tests.nets"
ROWS = 2
SUM = Objective("sum")


class Parametrised(nn.Module):
    """Weights that are computed anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = parametrizations.weight_norm(nn.Linear(5, 4))
        self.turned = parametrizations.orthogonal(nn.Linear(4, 4))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.turned(self.act(self.scaled(x)))
        return out


class Meet(nn.Module):
    """Several tensors by position, in a list and by name; a dictionary of them comes out, and what is no tensor."""

    def forward(self, x: Tensor, more: list[Tensor], *, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"sum": (x + more[0]) * scale, "parts": (x * mask, {"last": more[1] - mask}), "scale": scale}


class Meeting(nn.Module):
    """Three inputs; a part that takes all of them, twice, the second time from its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.meet = nn.Linear(4, 3), nn.Linear(2, 3), Meet()
        self.idle = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor, *, c: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = self.one(a), self.two(b)
        found = self.meet(x, [y, c], mask=y.sigmoid(), scale=0.5)
        found = self.meet(found["sum"], [found["parts"][0], y], mask=found["parts"][1]["last"])
        return found["sum"] * found["parts"][0] + found["parts"][1]["last"], {"y": y}


class Keep(nn.Module):
    """Returns what may be read and not written to."""

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        return MappingProxyType({"twice": x * 2, "deep": MappingProxyType({"squares": [x * x]})})


class Sealed(nn.Module):
    """A part returns an immutable mapping, and the model does too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 3), Keep()

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        found = self.keep(self.linear(x))
        return MappingProxyType({"out": found["twice"] + found["deep"]["squares"][0]})


MADE: dict[str, tuple[InputSpec, ...]] = {
    "Parametrised": (InputSpec("x", (5,)),),
    "Meeting": (InputSpec("a", (4,)), InputSpec("b", (2,)), InputSpec("c", (3,))),
    "Sealed": (InputSpec("x", (4,)),),
}
# Every tensor at every call, and how many of them there are.
COUNTS = {
    "Meeting": 23,
    "Parametrised": 15,
    "Sealed": 7,
    "Keywords": 14,
    "Tied": 12,
    "NeverCalled": 44,
    "Recursive": 10,
    "Retries": 5,
    "Structured": 20,
    "TimeFirst": 11,
}


def loaded(name: str) -> LoadedModel:
    """A model of this file or of the others', with random weights."""
    inputs = MADE.get(name) or INPUTS[name]
    source = f"python:{HERE if name in MADE else NETS}:{name}"
    model = load_model(ModelSpec(name, source, weights="random:0", inputs=inputs, device="cpu"))
    seeded(model.module, 3)
    return model


def called(model: LoadedModel, inputs: Mapping[str, Tensor]) -> Any:
    """A plain forward, as the model's source says: one input by position, several by name."""
    copies = {name: value.clone() for name, value in inputs.items()}
    return model.module(*copies.values()) if len(copies) == 1 else model.module(**copies)


def seen(model: LoadedModel, inputs: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Every tensor that entered or left any module."""
    return record(model.module, *inputs.values()) if len(inputs) == 1 else record(model.module, **inputs)


def text(key: Key, site: str) -> str:
    name, call, path, _ = key
    return f"{name}#{call}{''.join(f'[{part}]' for part in path)}:{site}"


def placed(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """A structure with one tensor changed."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, MappingProxyType):
        return MappingProxyType(placed(dict(value), path, change))
    if isinstance(value, dict):
        return {name: placed(item, rest, change) if str(name) == key else item for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{key: placed(getattr(value, key), rest, change)})  # type: ignore[type-var]
    if hasattr(value, "_fields"):
        return value._replace(**{key: placed(getattr(value, key), rest, change)})
    items = [placed(item, rest, change) if str(at) == key else item for at, item in enumerate(value)]
    return type(value)(items)


@contextmanager
def changed(module: nn.Module, key: Key, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A module of which one tensor is changed as it enters or leaves one call; calls count as they begin."""
    name, call, path, site = key
    part = module.get_submodule("" if name == "." else name)
    begun, running = [-1], list[int]()

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        begun[0] += 1
        running.append(begun[0])
        if site != "input" or running[-1] != call:
            return None
        given = {**{str(at): item for at, item in enumerate(args)}, **kwargs}
        holding = [key for key, item in given.items() if flatten(item)]
        place = (*holding, *path) if len(holding) == 1 else path
        given = placed(given, place, change)
        return tuple(given[str(at)] for at in range(len(args))), {key: given[key] for key in kwargs}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return placed(output, path, change) if running.pop() == call and site == "output" else None

    handles = [
        part.register_forward_pre_hook(before, with_kwargs=True),
        part.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def answers(model: LoadedModel, inputs: Mapping[str, Tensor], texts: list[str], *more: Any) -> dict[str, Tensor]:
    """The project's answer, by key."""
    plan = make_plan([parse_selector(each) for each in texts], model.catalog, *more)
    taken = extract_plan(model, inputs, plan, model.catalog, 8)
    return {result.key: taken[result.capture].values for result in plan.results}


def score(model: LoadedModel, output: Any) -> Tensor:
    """The sum of the model's first floating output."""
    return next(info for info in ordered(output) if info.is_floating_point()).float().sum()


def ordered(value: Any) -> Iterator[Tensor]:
    """Tensors in a value's own order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from ordered(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from ordered(item)


def keys_of(name: str, model: LoadedModel, inputs: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    found = seen(model, inputs)
    assert len(found) == COUNTS[name]
    return found


@pytest.mark.parametrize("name", COUNTS)
def test_values(name: str) -> None:
    """Every tensor of every call, by input and output, is what an independent hook copied."""
    model = loaded(name)
    inputs = batch(model.inputs, ROWS, seed=1)
    truth = keys_of(name, model, inputs)
    found = answers(model, inputs, [text(key, key[3]) for key in truth])
    for key, value in truth.items():
        got = found[text(key, key[3])]
        torch.testing.assert_close(got, value.float() if value.is_floating_point() else value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", COUNTS)
def test_gradients(name: str) -> None:
    """Every floating tensor that has rows has the gradient of something added to it there."""
    model = loaded(name)
    inputs = batch(model.inputs, ROWS, seed=2)
    truth = {key: value for key, value in keys_of(name, model, inputs).items() if value.is_floating_point()}
    shared = {key for key in truth if "parametrizations" in key[0]}
    texts = [text(key, f"grad_{key[3]}") for key in truth if key not in shared]
    together = answers(model, inputs, texts, (), SUM)
    nonzero = 0
    for key, value in truth.items():
        asked = text(key, f"grad_{key[3]}")
        if key in shared:
            with pytest.raises(RequestError, match="same for all rows"):
                answers(model, inputs, [asked], (), SUM)
            continue
        delta = torch.zeros_like(value).requires_grad_()
        with changed(model.module, key, lambda info, delta=delta: info + delta):  # type: ignore[misc]
            end = score(model, called(model, inputs))
        wanted = torch.autograd.grad(end, delta, allow_unused=True)[0] if end.requires_grad else None
        wanted = torch.zeros_like(value) if wanted is None else wanted
        nonzero += bool(wanted.any())
        for got in (together[asked], answers(model, inputs, [asked], (), SUM)[asked]):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert nonzero >= min(5, len(texts) // 2)


@pytest.mark.parametrize("name", COUNTS)
def test_changes(name: str) -> None:
    """Every floating tensor can be changed, and what the model returns is what it returns if that is done by hand."""
    model = loaded(name)
    inputs = batch(model.inputs, ROWS, seed=3)
    truth = {key: value for key, value in keys_of(name, model, inputs).items() if value.is_floating_point()}
    plain = flatten(called(model, inputs))
    differing = 0
    for key in truth:
        how = Intervention(parse_selector(text(key, key[3])), Operation("scale", by=-1.5))
        found = answers(model, inputs, ["."], [how])
        with changed(model.module, key, lambda info: info * -1.5), torch.no_grad():
            wanted = flatten(called(model, inputs))
        for path, value in wanted.items():
            got = found["." + "".join(f"[{part}]" for part in path)] if len(wanted) > 1 else next(iter(found.values()))
            torch.testing.assert_close(got, value.float() if value.is_floating_point() else value, equal_nan=True)
        differing += any(not torch.equal(value, plain[path]) for path, value in wanted.items())
    assert differing >= len(truth) * 0.8


# Calls, names, and parts that never run


def test_calls_from_both_ends() -> None:
    """#0, #-1 and #* name calls alike for values, gradients and changes."""
    model = loaded("Tied")
    inputs = batch(model.inputs, ROWS)
    names = {"encode#0": 0, "encode#1": 1, "encode#-1": 1, "encode#-2": 0, "encode": 1, "decode": 1, "decode#0": 0}
    truth = seen(model, inputs)
    values = answers(model, inputs, list(names))
    for name, call in names.items():
        torch.testing.assert_close(values[name], truth["encode", call, (), "output"])
    assert list(answers(model, inputs, ["decode#*:input"])) == ["decode#0:input", "decode#1:input"]
    texts = [f"{name}:grad_input" for name in names]
    gradients = answers(model, inputs, texts, (), SUM)
    for name, call in names.items():
        assert torch.equal(gradients[f"{name}:grad_input"], gradients[f"encode#{call}:grad_input"])
    assert not torch.equal(gradients["encode#0:grad_input"], gradients["encode#1:grad_input"])
    ends = {}
    for name in (*names, "encode#*"):
        how = Intervention(parse_selector(name), Operation("add", value=1.0))
        ends[name] = answers(model, inputs, ["."], [how])["."]
    for name, call in names.items():  # without a call every one is changed
        assert torch.equal(ends[name], ends[f"encode#{call}" if "#" in name else "encode#*"])
    net: Any = model.module
    x = inputs["x"]
    with torch.no_grad():
        torch.testing.assert_close(ends["encode#0"], net.encode((net.encode(x) + 1).tanh()))
        torch.testing.assert_close(ends["encode#1"], net.encode(net.encode(x).tanh()) + 1)
        torch.testing.assert_close(ends["encode#*"], net.encode((net.encode(x) + 1).tanh()) + 1)


@pytest.mark.parametrize("site", ["output", "input", "grad_output", "grad_input"])
@pytest.mark.parametrize(("name", "layer"), [("NeverCalled", "silent"), ("Meeting", "idle")])
def test_parts_that_never_run(name: str, layer: str, site: str) -> None:
    """A part that the forward does not call is refused at every site, and as something to change."""
    model = loaded(name)
    objective = SUM if site.startswith("grad") else None
    with pytest.raises(RequestError, match="never runs"):
        make_plan([parse_selector(f"{layer}:{site}")], model.catalog, (), objective)
    if site != "grad_input":
        how = Intervention(parse_selector(f"{layer}:{site}"), Operation("scale", by=2.0))
        with pytest.raises(RequestError, match="never runs"):
            make_plan([parse_selector(".:grad_input")], model.catalog, [how], SUM)


def test_parametrised_weights_are_no_rows() -> None:
    """A weight that a part computes is the same for all rows, is known by the plain type, and is changed for all."""
    model = loaded("Parametrised")
    inputs = batch(model.inputs, 3)
    net: Any = model.module
    name = "scaled.parametrizations.weight"
    weight = answers(model, inputs, [name])[name]
    v = net.scaled.parametrizations.weight.original1
    torch.testing.assert_close(weight, net.scaled.parametrizations.weight.original0 * v / v.norm(dim=1, keepdim=True))
    turned = answers(model, inputs, ["turned.parametrizations.weight"])["turned.parametrizations.weight"]
    torch.testing.assert_close(turned, net.turned.weight)
    pooled = Selector(name, name, reduction=Reduction(pool="mean"))
    with pytest.raises(RequestError, match="one entry for each input"):
        make_plan([pooled], model.catalog)
    linear = make_plan([Selector("", "*", type="Linear")], model.catalog)
    assert [result.key for result in linear.results] == ["scaled", "turned"]
    how = Intervention(parse_selector(name), Operation("zero"))
    with torch.no_grad():
        expected = net.turned(net.scaled.bias.expand(3, -1).tanh())
    torch.testing.assert_close(answers(model, inputs, ["."], [how])["."], expected)


# Tensors without plain memory


class Adjacency(nn.Module):
    """Sparse, from dense rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to_sparse()


class Mix(nn.Module):
    """Takes a sparse tensor beside a dense one."""

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return adjacency.to_dense() + x


class Ragged(nn.Module):
    """A nested tensor, whatever the rows."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.nested.nested_tensor([x[0, :1], x[0, :2]], layout=torch.jagged)
        return found


class Both(nn.Module):
    """Sparse and dense ones together."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"dense": x * 2, "more": [x.to_sparse()]}


class Graph(nn.Module):
    """Sparse and nested tensors on every side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adjacency, self.mix = nn.Linear(4, 4), Adjacency(), Mix()
        self.same, self.ragged, self.both = nn.Identity(), Ragged(), Both()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        self.ragged(x)
        found = self.both(self.mix(self.same(self.adjacency(x)), x))
        return {"out": found["dense"], "graph": found["more"][0]}


class OnlySparse(Adjacency):
    """A model whose output is sparse."""


class Attention(nn.Module):
    """Attends where it is told to, and returns something sparse."""

    def forward(self, x: Tensor, attends: bool) -> Tensor:
        return (torch.softmax(x @ x.transpose(-1, -2), -1) @ x if attends else x).to_sparse()


class SparseAttention(nn.Module):
    """Of two calls of a part one computes attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.attention(x, attends=False).to_dense(), attends=True).to_dense()


MADE |= {
    "Graph": (InputSpec("x", (4,)),),
    "OnlySparse": (InputSpec("x", (4,)),),
    "SparseAttention": (InputSpec("x", (3, 4)),),
}

SPARSE = {
    "adjacency": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "adjacency#0": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "adjacency[0]": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "adjacency:grad_output": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "same:input": ("input of layer 'same' is sparse", "a layer before it"),
    "same:grad_input": ("input of layer 'same' is sparse", "a layer before it"),
    "mix[0]:input": (r"input of layer 'mix' at '\[0\]' is sparse", "paths here: [1]"),
    "both[more]": (r"output of layer 'both' at '\[more\]\[0\]' is sparse", "paths here: [dense]"),
    "both[more][0]": (r"output of layer 'both' at '\[more\]\[0\]' is sparse", "paths here: [dense]"),
    "both[more][0][0]": (r"output of layer 'both' at '\[more\]\[0\]' is sparse", "paths here: [dense]"),
    ".[graph]": (r"output of layer '.' at '\[graph\]' is sparse", "paths here: [out]"),
    "ragged": ("output of layer 'ragged' is nested", "a layer before it"),
    "adj*": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "b*[more]": (r"output of layer 'both' at '\[more\]\[0\]' is sparse", "paths here: [dense]"),
    "both[other]": (r"nothing at '\[other\]'", "paths here: [dense]"),
}


@pytest.mark.parametrize("asked", SPARSE)
def test_sparse_and_nested_tensors_are_refused(asked: str) -> None:
    """What has no plain memory is refused by its kind and place before any forward, to be taken or to be changed."""
    model = loaded("Graph")
    words, hint = SPARSE[asked]
    with pytest.raises(RequestError, match=words) as caught:
        make_plan([parse_selector(asked)], model.catalog, (), SUM if "grad" in asked else None)
    assert hint in caught.value.hint
    assert caught.value.faults[0].pointer == "/layers/0"
    if "grad_input" not in asked:
        how = Intervention(parse_selector(asked), Operation("scale", by=2.0))
        with pytest.raises(RequestError, match=words):
            make_plan([parse_selector("linear:grad_output")], model.catalog, [how], SUM)


def test_attention_where_values_are_sparse() -> None:
    """A layer without attention says just that, whatever it returns."""
    with pytest.raises(RequestError, match="computes no attention"):
        make_plan([parse_selector("adjacency:attention")], loaded("Graph").catalog)
    model = loaded("SparseAttention")
    with pytest.raises(RequestError, match="the attention of layer 'attention' holds no tensor"):
        make_plan([parse_selector("attention#0:attention")], model.catalog)
    assert list(answers(model, batch(model.inputs, 2), ["attention#1:attention"])) == ["attention#1:attention"]


def test_what_is_dense_beside_them() -> None:
    """Dense tensors beside sparse ones are taken, differentiated and changed; a glob passes over the others."""
    model = loaded("Graph")
    inputs = batch(model.inputs, 3)
    truth = seen(model, inputs)
    assert list(answers(model, inputs, ["*"])) == ["linear", "mix", "both[dense]"]
    found = answers(model, inputs, ["mix:input", "mix[1]:input", "both", ".", ".[out]"])
    keys = (("mix", ("1",), "input"),) * 2 + (("both", ("dense",), "output"), (".", ("out",), "output")) * 1
    for got, (name, path, site) in zip(found.values(), (*keys, keys[-1]), strict=True):
        torch.testing.assert_close(got, truth[name, 0, path, site])
    net: Any = model.module
    x = net.linear(inputs["x"]).detach()
    gradients = answers(model, inputs, ["mix[1]:grad_input", "both:grad_output"], (), SUM)
    assert torch.equal(gradients["mix[1]:grad_input"], torch.full((3, 4), 2.0))
    assert torch.equal(gradients["both:grad_output"], torch.ones(3, 4))
    for place in ("mix[1]:input", "mix:input"):
        changed_input = answers(model, inputs, ["."], [Intervention(parse_selector(place), Operation("zero"))])
        torch.testing.assert_close(next(iter(changed_input.values())), x.relu() * 2)
    changed_output = answers(model, inputs, ["."], [Intervention(parse_selector("both"), Operation("zero"))])
    assert not next(iter(changed_output.values())).any()


def test_a_model_whose_output_is_sparse() -> None:
    """The whole output is refused by name, as an objective too; its input is there."""
    model = loaded("OnlySparse")
    with pytest.raises(RequestError, match=r"output of layer '\.' is sparse"):
        make_plan([parse_selector(".")], model.catalog)
    with pytest.raises(RequestError, match="is sparse"):
        make_plan([parse_selector(".:grad_input")], model.catalog, (), Objective("layer", selector=parse_selector(".")))
    with pytest.raises(RequestError, match="no floating tensor to differentiate"):
        make_plan([parse_selector(".:grad_input")], model.catalog, (), SUM)
    inputs = batch(model.inputs, 2)
    assert torch.equal(answers(model, inputs, [".:input"])[".:input"], inputs["x"])


# Containers that can't be made again


class Point(tuple[Any, ...]):
    """A tuple made from something else."""

    __slots__ = ()

    def __new__(cls, x: Tensor, y: Tensor) -> Point:
        return super().__new__(cls, (x, y))


class Points(nn.Module):
    def forward(self, x: Tensor) -> Point:
        return Point(x * 2, x * 3)


class Pointing(nn.Module):
    """A part returns a container that can't be made again; what goes wrong in it is caught."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.points = nn.Linear(4, 3), Points()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        try:
            first: Tensor = self.points(x)[0]
        except Exception:
            return x
        return first


MADE |= {"Pointing": (InputSpec("x", (4,)),)}


def test_a_container_that_can_not_be_made_again() -> None:
    """To be read it is as any other; a change or a gradient within it is refused, though the model catches errors."""
    model = loaded("Pointing")
    inputs = batch(model.inputs, 2)
    truth = seen(model, inputs)
    found = answers(model, inputs, ["points", "points[1]"])
    for at in (0, 1):
        assert torch.equal(found[f"points[{at}]"], truth["points", 0, (str(at),), "output"])
    with pytest.raises(InputError, match="'Point' can't be made again") as caught:
        answers(model, inputs, ["."], [Intervention(parse_selector("points[0]"), Operation("scale", by=2.0))])
    assert "a layer before it" in caught.value.hint
    with pytest.raises(InputError, match="'Point' can't be made again"):
        answers(model, inputs, ["points[1]:grad_output"], (), SUM)
    assert model.hooks == 0
    assert answers(model, inputs, ["linear:grad_output"], (), SUM)["linear:grad_output"].eq(2).all()
