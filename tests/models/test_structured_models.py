"""Models of every structure: each value, gradient and change against hooks that know nothing of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from layertap.models.errors import RequestError
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from tests.loading import load_model
from tests.models.extraction import extract_plan, see
from tests.nets import INPUTS, batch
from tests.oracle import Key, Path, flatten, seeded

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
        return self.turned(self.act(self.scaled(x)))


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


MADE: dict[str, tuple[InputSpec, ...]] = {
    "Parametrised": (InputSpec("x", (5,)),),
    "Graph": (InputSpec("x", (4,)),),
    "Meeting": (InputSpec("a", (4,)), InputSpec("b", (2,)), InputSpec("c", (3,))),
}
# Every tensor at every call, and how many of them there are.
COUNTS = {"Meeting": 23, "Parametrised": 15, "Keywords": 14, "Recursive": 10, "Structured": 20, "TimeFirst": 11}


def loaded(name: str) -> LoadedModel:
    """A model of this file or of the others', with random weights."""
    inputs = MADE.get(name) or INPUTS[name]
    source = f"python:{HERE if name in MADE else NETS}:{name}"
    model = load_model(ModelSpec(name, source, weights="random:0", inputs=inputs, device="cpu"))
    seeded(model.module, 3)
    model.replicas[0].take()
    return model


def called(model: LoadedModel, inputs: Mapping[str, Tensor]) -> Any:
    """A plain forward, as the model's source says: one input by position, several by name."""
    copies = {name: value.clone() for name, value in inputs.items()}
    return model.module(*copies.values()) if len(copies) == 1 else model.module(**copies)


def text(key: Key, site: str) -> str:
    name, call, path, _ = key
    return f"{name}#{call}{''.join(f'[{part}]' for part in path)}:{site}"


def placed(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """A structure with one tensor changed."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {name: placed(item, rest, change) if str(name) == key else item for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{key: placed(getattr(value, key), rest, change)})
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

    with (
        part.register_forward_pre_hook(before, with_kwargs=True),
        part.register_forward_hook(after, always_call=True),
    ):
        yield


def answers(model: LoadedModel, inputs: Mapping[str, Tensor], texts: list[str], *more: Any) -> dict[str, Tensor]:
    """The project's answer, by key."""
    plan = make_plan([parse_selector(each) for each in texts], model.catalog, *more)
    taken = extract_plan(model, inputs, plan, model.catalog, 8)
    return {result.key: taken[result.capture].values for result in plan.results}


def score(output: Any) -> Tensor:
    """The sum of the model's first floating output; ``flatten`` begins with the last."""
    return next(info for info in reversed(flatten(output).values()) if info.is_floating_point()).float().sum()


def floating(name: str, model: LoadedModel, inputs: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    found = see(model, inputs)
    assert len(found) == COUNTS[name]
    return {key: value for key, value in found.items() if value.is_floating_point()}


@pytest.mark.parametrize("name", COUNTS)
def test_gradients(name: str) -> None:
    """Every floating tensor that has rows has the gradient of something added to it there."""
    model = loaded(name)
    inputs = batch(model.inputs, ROWS, seed=2)
    truth = floating(name, model, inputs)
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
        with changed(model.module, key, lambda info, delta=delta: info + delta):
            end = score(called(model, inputs))
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
    truth = floating(name, model, inputs)
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


# Tensors without plain memory


class Adjacency(nn.Module):
    """Sparse, from dense rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to_sparse()


class Graph(nn.Module):
    """A part returns a sparse tensor, and the model both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adjacency = nn.Linear(4, 4), Adjacency()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        graph = self.adjacency(self.linear(x))
        return {"out": graph.to_dense(), "graph": graph}


SPARSE = {
    "adjacency": ("output of layer 'adjacency' is sparse", "a layer before it"),
    "adjacency:grad_output": ("output of layer 'adjacency' is sparse", "a layer before it"),
    ".[graph]": (r"output of layer '.' at '\[graph\]' is sparse", "paths here: [out]"),
}


@pytest.mark.parametrize("asked", SPARSE)
def test_sparse_tensors_are_refused(asked: str) -> None:
    """What has no plain memory is refused before any forward, to be taken or changed; what is dense is given."""
    model = loaded("Graph")
    words, hint = SPARSE[asked]
    with pytest.raises(RequestError, match=words) as caught:
        make_plan([parse_selector(asked)], model.catalog, (), SUM if "grad" in asked else None)
    assert hint in caught.value.hint
    how = Intervention(parse_selector(asked), Operation("scale", by=2.0))
    with pytest.raises(RequestError, match=words):
        make_plan([parse_selector("linear:grad_output")], model.catalog, [how], SUM)
    assert answers(model, batch(model.inputs, 3), ["*", "."]).keys() == {"linear", "."}
