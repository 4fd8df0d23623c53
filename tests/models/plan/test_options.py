"""What options need of a tensor, and what is said where it has not got it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.errors import RequestError, SelectorError
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import OPERATIONS
from layertap.models.plan.options import TextLengths, check_need, check_shape, raise_first
from layertap.models.plan.planner import make_plan, resolve_intervention, resolve_objective
from layertap.models.plan.requested import Intervention, Objective, Operation, Reduction, TensorData, TensorSource
from layertap.models.plan.selectors import parse_selector

TOKENS = TensorInfo((), (1, 5, 8), "float32", layout="NTC", token_axes=(1,))
MAP = TensorInfo((), (1, 8, 4, 6), "float32", layout="NCHW")
SCORES = TensorInfo((), (1, 3), "float32", layout="NC")
LAYERS = {
    ".": SCORES,
    "tokens": TOKENS,
    "map": MAP,
    "counts": replace(MAP, dtype="int64"),
    "shared": replace(MAP, row_axis=None),
    "mixed": replace(MAP, row_axis=None, crosses_rows=True),
    "windows": replace(MAP, shape=(4, 8, 4, 6)),
    "unknown": replace(MAP, layout=None),
    "smaller": replace(MAP, shape=(1, 8, 4, 4)),
    "single": replace(SCORES, shape=(1, 1)),
}


def catalog_of(**more: Any) -> Catalog:
    layers = {
        name: Layer(
            name, "Part", True, 0, (Call(CallBoundary(at, 0.0, (info,)), CallBoundary(at + 0.5, 0.1, (info,))),), ()
        )
        for at, (name, info) in enumerate(LAYERS.items())
    }
    return Catalog(layers, 1.0, crosses_rows=False, **more)


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("tokens", "map", "has no axis for 'tokens'"),
        ("region", "tokens", "has no axis for 'region'"),
        ("project", "unknown", "has no axis for 'project'"),
        ("project", "counts", "is of dtype int64: 'project' needs floating values"),
        ("pool", "shared", "is the same for all rows: 'pool' needs one entry for each input"),
        ("stats", "mixed", "is made of all rows of a forward together: 'stats' needs one entry for each input"),
        ("gradient", "counts", "is of dtype int64: 'gradient' needs floating values"),
    ],
)
def test_needs(option: str, name: str, reason: str) -> None:
    """An option is refused at a tensor without its axes, floating values or rows, and taken where it has them."""
    with pytest.raises(SelectorError, match=reason):
        raise_first(check_need(option, "it", LAYERS[name]))
    assert not [*check_need(option, "it", TOKENS if option == "tokens" else MAP)]


OBJECTIVES_REFUSED: dict[str, tuple[Objective, str]] = {
    "class of a layer": (
        Objective("layer", 1, selector=parse_selector("map")),
        "'layer' takes no 'class'; these do: 'log",
    ),
    "target of a logit": (Objective(target=(0.5, 0.5, 0.0)), "'logit' takes no 'target'; these do: 'cross_entropy'"),
    "outputs of a sum": (Objective("sum", outputs="probabilities"), "'sum' takes no 'outputs'"),
    "terms of a loss": (Objective("mse", ((1.0, 0),)), "'mse' takes no 'terms'"),
    "layer of a class": (Objective(selector=parse_selector("map")), "needs an output of shape (rows, classes)"),
    "mean over inputs": (Objective(over="inputs"), "leave 'over' out"),
    "no layer": (Objective("layer"), "needs a layer"),
    "reduction": (Objective("mse", 1, reduction="batchmean"), "has no reduction 'batchmean'; use one of 'mean', 'sum'"),
    "two targets": (Objective("mse", 1, (0.0, 0.0, 0.0)), "replaces a class"),
    "no distribution": (Objective("kl_div", target=(0.5, 0.2, 0.1)), "is not a probability distribution"),
    "short target": (Objective("mse", target=(0.5, 0.5)), "has 2 numbers, the model has 3 classes"),
    "class": (Objective(klass=3), "class 3 is out of range; use 0 to 2"),
    "channel": (
        Objective("layer", selector=parse_selector("map"), channel=8),
        "'channel' of the objective's tensor must",
    ),
    "no channels": (Objective("layer", selector=parse_selector("unknown"), channel=1), "has no axis for 'channels'"),
    "position": (Objective("sum", selector=parse_selector("map"), position=(4, 0)), "between -4 and 3"),
    "column": (Objective("sum", selector=parse_selector("map"), position=(0, 6)), "between -6 and 5"),
    "token of a map": (
        Objective("sum", selector=parse_selector("map"), position=(0,)),
        "has no tokens: 'position' is one",
    ),
    "no rows": (
        Objective("sum", selector=parse_selector("mixed")),
        "is made of all rows of a forward together: 'objective'",
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES_REFUSED)
def test_objectives(name: str) -> None:
    """An objective that its kind or its tensor does not fit is refused with what to write."""
    objective, reason = OBJECTIVES_REFUSED[name]
    with pytest.raises(SelectorError) as caught:
        resolve_objective(objective, catalog_of())
    assert reason in f"{caught.value.detail}; {caught.value.hint}"


def test_objectives_of_other_sizes() -> None:
    """Where rows may have another shape, classes and positions of the example are not counted."""
    for objective in (Objective(klass=7), Objective("sum", selector=parse_selector("map"), position=(9, 9))):
        assert resolve_objective(objective, catalog_of(sizes_known=False)).objective.position == objective.position


def data(*shape: int) -> TensorData:
    size = 4
    for each in shape:
        size *= each
    return TensorData(shape, b"\0" * size)


CHANGES_REFUSED: dict[str, tuple[str, Operation, str]] = {
    "parameter": ("map", Operation("relu", by=2.0), "op 'relu' takes no 'by'; these do: 'scale'"),
    "none": ("map", Operation("clamp"), "op 'clamp' needs 'min' or 'max'"),
    "two": ("map", Operation("add", value=1.0, tensor=data(1)), "takes 'value' or 'tensor', not both"),
    "integers": ("counts", Operation("zero"), "is of dtype int64: 'op' needs floating values"),
    "index twice": ("map", Operation("zero", channels=(1, -7)), "'channels' of 'map' names an index twice"),
    "index": ("map", Operation("zero", channels=(8,)), "between -8 and 7"),
    "region": ("map", Operation("zero", region=(0, 0, 4, 7)), "'region' of 'map' must lie within 4 by 6"),
    "shape": (
        "map",
        Operation("replace", tensor=data(8, 4, 5)),
        "has shape [8, 4, 5]; send [8, 4, 6], or what broadcasts",
    ),
    "each of no axis": ("map", Operation("zero", each=("tokens",)), "has no axis for 'each'"),
    "other shape": (
        "map",
        Operation("add", source=TensorSource(0, parse_selector("smaller"))),
        "[8, 4, 4], and [8, 4, 6]",
    ),
    "other axes": (
        "tokens",
        Operation("add", tokens=(0,), source=TensorSource(0, parse_selector("map"))),
        "no axis for 'from'",
    ),
    "shared": (
        "map",
        Operation("add", source=TensorSource(0, parse_selector("shared"))),
        "is the same for all rows: 'from'",
    ),
}


@pytest.mark.parametrize("name", CHANGES_REFUSED)
def test_changes(name: str) -> None:
    """An operation that does not fit a tensor is refused with what to write."""
    layer, operation, reason = CHANGES_REFUSED[name]
    with pytest.raises(SelectorError) as caught:
        resolve_intervention(Intervention(parse_selector(layer), operation), None, catalog_of())
    assert reason in f"{caught.value.detail}; {caught.value.hint}"


REDUCTIONS_REFUSED: dict[str, tuple[str, Reduction, str]] = {
    "by": ("map", Reduction(stats=("mean",), by="head"), "has no axis for 'by'"),
    "entropy": ("map", Reduction(stats=("entropy",)), "is no attention"),
    "stats and a pool": ("map", Reduction(stats=("mean",), pool="max"), "contradicts 'pool'"),
    "bins of all": ("map", Reduction(stats=("histogram",), over="inputs"), "is of each input only"),
    "std alone": ("map", Reduction(stats=("std",), over="inputs"), "add 'mean' to 'stats'"),
    "tokens of all": ("tokens", Reduction(stats=("mean",), over="inputs"), "as many values as an input has tokens"),
    "last": ("map", Reduction(pool="last"), "has no tokens"),
}


@pytest.mark.parametrize("name", REDUCTIONS_REFUSED)
def test_reductions(name: str) -> None:
    """A reduction that a tensor does not fit is refused with what to write."""
    layer, reduction, reason = REDUCTIONS_REFUSED[name]
    with pytest.raises(RequestError) as caught:
        make_plan([replace(parse_selector(layer), reduction=reduction)], catalog_of())
    assert reason in f"{caught.value.detail}; {caught.value.hint}"


def test_shapes_of_texts() -> None:
    """A tensor must fit every text: one that broadcasts fits any length, and unknown lengths are checked later."""

    def refuse(shape: tuple[int, ...], lengths: TextLengths, info: TensorInfo = TOKENS) -> list[str]:
        found = check_shape("it", info, lengths, lambda part: part.shape[1:], shape, broadcasts=True)
        return [detail for detail, _ in found][:1]

    same, several = TextLengths(5, 5, 5, 5), TextLengths(3, 5, 5, 5)
    assert not refuse((5, 8), same)
    assert not refuse((8,), several)
    assert not refuse((7, 8), TextLengths(1, 9, 9, 9, known=False))
    assert refuse((4, 8), same) == ["it has shape [4, 8]"]
    assert refuse((5, 8), several) == ["it fits texts of one length, and these have 3 to 5 tokens"]
    moved = TextLengths(3, 3, 5, 5)
    shared = replace(TOKENS, row_axis=None)
    assert refuse((3, 8), moved, shared) == [
        "it fits texts of one length, and these have tokens at different positions"
    ]


def test_tables() -> None:
    """A loss of probabilities takes a distribution; an operation that takes a tensor takes one of another input too."""
    of_targets = {kind for kind, spec in OBJECTIVES.items() if "target" in spec.takes}
    assert (
        of_targets
        == {kind for kind, spec in OBJECTIVES.items() if spec.reductions}
        == {"cross_entropy", "kl_div", "mse"}
    )
    assert all(("tensor" in spec.needs) == ("from" in spec.needs) for spec in OPERATIONS.values())
