"""Functions inside a forward: what they take and return, by name and number, against plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.errors import LayerNotReachedError, RequestError
from layertap.models.hooks.attach import count_hooks
from layertap.models.hooks.functions import get_function_name
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Objective, Selector
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from tests.function_nets import Branches, Outer, count_modes, mix
from tests.models.extraction import extract_captures
from tests.oracle import seeded


def survey_functions(module: nn.Module, *, functions: bool = True) -> Catalog:
    specs, cpu = (InputSpec("x", (4,)),), torch.device("cpu")
    return survey(module, specs, lambda rows: module(*rows.values()), cpu, 0, torch.float32, functions=functions)


def extract(module: nn.Module, selectors: Iterable[str | Selector], x: Tensor) -> dict[str, Tensor]:
    """What selectors give of one forward."""
    parsed = [parse_selector(each) if isinstance(each, str) else each for each in selectors]
    plan = make_plan(parsed, survey_functions(module))
    results = extract_captures(FeatureExtractor(module), lambda: module(x.clone()), plan.captures, len(x))
    assert (count_hooks(module), count_modes()) == (0, 0)
    return {result.key: results[result.capture].values for result in plan.results}


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def outer() -> Outer:
    return seeded(Outer(), 1).eval()


@pytest.mark.parametrize("together", [True, False])
def test_values(outer: Outer, together: bool) -> None:
    """Each is what it was then, whatever was written to it later; also where the forward ends there."""
    x = rows()
    expected = mix(outer.mixer, x - 1)
    asked = [list(expected)] if together else [[text] for text in expected]
    found = {key: value for texts in asked for key, value in extract(outer, texts, x).items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


KEYS = {
    "mixer/mul#*": ("mixer/mul#0", "mixer/mul#1"),
    "mixer#0/mul": ("mixer#0/mul#0", "mixer#0/mul#1"),
    "*/add#0": ("mixer/add#0", "mixer.halves#1/add#0"),
    "mixer.*#*/add": ("mixer.halves#0/add#0", "mixer.halves#1/add#0"),
    "mixer/split": ("mixer/split#0[0]", "mixer/split#0[1]"),
}


@pytest.mark.parametrize("text", KEYS)
def test_names(text: str) -> None:
    """Several of a name, or of a layer, have canonical keys, in the order in which they are called."""
    assert tuple(outer_keys(text)) == KEYS[text]


def test_aliases() -> None:
    """An alias stands for a lone function, and before the names of several."""
    assert outer_keys("mixer/add#0", alias="a") == ["a"]
    assert outer_keys("mixer/mul", alias="a") == ["a/mul#0", "a/mul#1"]
    assert outer_keys("*/add:input", path=("1",)) == ["mixer/add#1[1]:input", "mixer.halves#1/add#0[1]:input"]


def outer_keys(text: str, alias: str | None = None, path: tuple[str, ...] | None = None) -> list[str]:
    selector = parse_selector(text)
    parts = {"alias": alias} | ({"path": path} if path else {})
    return [result.key for result in make_plan([Selector(**vars(selector) | parts)], survey_functions(Outer())).results]


def test_no_mode_where_nobody_asks(outer: Outer) -> None:
    """A mode is on only in the layer whose functions are wanted, and not in its parts."""

    def count_in(*selectors: str) -> tuple[list[int], list[int]]:
        outer.mixer.modes, outer.mixer.halves.modes = [], []
        plan = make_plan(list(map(parse_selector, selectors)), catalog)
        extract_captures(FeatureExtractor(outer), lambda: outer(rows()), plan.captures, 3)
        return outer.mixer.modes, outer.mixer.halves.modes

    catalog = survey_functions(outer)
    assert count_in("mixer", "mixer.halves:input", ".") == ([0], [0, 0])
    assert count_in("mixer", "./sub") == ([0], [0, 0])
    assert count_in("mixer", "mixer/add#0") == ([1], [0, 0])
    assert count_in("mixer", "mixer.halves#0/add", ".") == ([0], [1, 1])
    assert count_in("mixer", "mixer.halves#0/add", "mixer/add#0", "./sub") == ([1], [1, 1])
    outer.mixer.modes.clear()
    survey_functions(outer, functions=False)
    assert set(outer.mixer.modes) == {0}


def test_numbers_that_depend_on_the_input() -> None:
    """A forward that calls fewer of a name than its survey is told; those that depend on the batch are not offered."""
    module = Branches()
    assert not survey_functions(module).layers["."].calls[0].functions

    class ByRow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1 if bool(x.amax() < 100) else x * 2

    plan = make_plan([parse_selector("./add#0")], survey_functions(ByRow()))
    extractor = FeatureExtractor(ByRow())
    with pytest.raises(LayerNotReachedError, match=r"never reached"):
        extract_captures(extractor, lambda: ByRow()(torch.full((1, 4), 200.0)), plan.captures, 1)


def test_a_forward_that_raises_leaves_nothing(outer: Outer) -> None:
    """However a forward ends, no mode is on and no hook is left."""
    plan = make_plan([parse_selector("mixer/add#1"), parse_selector("mixer.halves/add")], survey_functions(outer))
    extractor = FeatureExtractor(outer)

    def forward() -> object:
        return outer(torch.ones(2, 5))

    with pytest.raises(RuntimeError):
        extract_captures(extractor, forward, plan.captures, 2)
    assert (count_hooks(outer), count_modes()) == (0, 0)


REFUSED = {
    "mixer/mul#2": ("calls no such function", "functions here: add#0, relu#0, mul#0, split#0, cat#0, mul#1"),
    "mixer/add#x": ("is no call number", "write '#0'"),
    "mixer/__class__": ("calls no such function", "functions here"),
    "mixer/split#0[2]": ("the output of 'mixer/split#0' has nothing at '[2]'", "paths here: [0], [1]"),
    "mixer/add#0[0]": ("the output of 'mixer/add#0' has nothing at '[0]'", "leave the path out"),
    "mixer.first/linear": ("calls no functions of its own", "?functions=true"),
    "mixer/add#0:grad_output": ("needs an objective", "objective"),
    "mixer/add#0:attention": ("the site 'attention' is one of layers", "use 'output' or 'input' or 'grad_output'"),
    "mixer/*": ("matches no layer", "name the function, 'mixer/add'"),
    "mixer#1/add#0": ("runs once in a forward", "use #0"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    """What is wrong, and what to write instead."""
    with pytest.raises(RequestError) as caught:
        make_plan([parse_selector(text)], survey_functions(Outer()))
    fault = (caught.value.faults or (caught.value.to_fault("/"),))[0]
    assert REFUSED[text][0] in fault.detail
    assert REFUSED[text][1] in (fault.hint or "")


def test_order() -> None:
    """A function has its own place in a forward: what runs behind the objective has no gradient by it."""
    catalog = survey_functions(Outer())
    objective = Objective("layer", selector=parse_selector("mixer/cat#0"))
    for text in ("mixer/relu#0", "mixer.halves#1/flip", "./sub"):
        make_plan([parse_selector(f"{text}:grad_output")], catalog, objective=objective)
    for text in ("mixer/mul#1", "mixer.last", "mixer"):
        with pytest.raises(RequestError, match="runs later"):
            make_plan([parse_selector(f"{text}:grad_output")], catalog, objective=objective)


def test_names_of_functions() -> None:
    """A function, its method, its operator, reflected and in place, have the name that the function has."""
    x, names = torch.ones(2), list[str | None]()

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(get_function_name(func))
            return func(*args, **(kwargs or {}))

    with Names():
        y = 1 + x
        y += x
        y.add_(x + y.add(x) + torch.add(x, x))
        assert {*names} == {"add"}
        names.clear()
        (1 & x.int(), 1 / x / torch.div(x, x), (1 - x) - torch.rsub(x, 1), 7 // x % 2, x[0], torch.rand(2) @ x, x.shape)
    assert {*names} == {
        *("int", "bitwise_and", "div", "sub", "floor_divide", "remainder", "getitem", "rand", "matmul", None)
    }
