"""A request's interventions and objective against a catalogue: what is changed where, what is differentiated.

Everything here happens before any forward; what can't be done is refused with what to type instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.padding import TextLengths
from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import SelectorError, escape
from layertap.models.gradients.objectives import CLASS_OBJECTIVES
from layertap.models.interventions.operations import compute_part_shape
from layertap.models.selection.hook_points import (
    EDITABLE,
    GRADIENTS,
    HookPoint,
    Intervention,
    Objective,
    Operation,
    format_path,
)
from layertap.models.selection.selectors import SelectorMatch, find_matches

Shape = tuple[int, ...]
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
# What each operation takes beside the part that it is narrowed to; one of each group, all groups.
TAKES: dict[str, tuple[tuple[str, ...], ...]] = {
    "zero": (),
    "scale": (("by",),),
    "add": (("value", "tensor"),),
    "clamp": (("min", "max"),),
    "replace": (("value", "tensor"),),
    "noise": (("std",),),
}
OPTIONAL = {"noise": ("seed",), "clamp": ("min", "max")}
PARAMETERS = ("by", "value", "min", "max", "std", "seed", "tensor")
NUMBERS = ("by", "value", "min", "max", "std")
SPREAD = 1e-3  # how far from 1 a target's probabilities may add up


@dataclass(frozen=True)
class ResolvedIntervention:
    """One tensor to change on its way, and how."""

    point: HookPoint
    leaf: TensorInfo
    operation: Operation


@dataclass(frozen=True)
class ResolvedObjective:
    """What is differentiated: an objective and the tensor that it looks at."""

    point: HookPoint
    leaf: TensorInfo
    objective: Objective


def resolve_intervention(
    intervention: Intervention, goal: ResolvedObjective | None, catalog: Catalog, lengths: TextLengths | None = None
) -> list[ResolvedIntervention]:
    """The changes that an intervention makes, one for each tensor that its selector names, at every call of a module.

    Where no call is named, a gradient is changed at those that the objective depends on. UnknownLayerError,
    SelectorError where that can't be: a site that is not changed, parameters that the operation does not take, a part
    that a tensor does not have.
    """
    how, selector = intervention.operation, intervention.selector
    if selector.site not in EDITABLE:
        raise SelectorError(
            f"an intervention at {escape(selector.site)} is not possible", hint=f"use {_listed(sorted(EDITABLE))}"
        )
    _check_parameters(how)
    anywhere = selector.call is None
    found, _ = find_matches(replace(selector, call="*") if anywhere else selector, catalog)
    floating = [item for item in found if item.leaf.dtype in FLOATS]
    if anywhere and selector.site in GRADIENTS:
        floating = _before_goal(floating, goal, catalog)
    if not floating:
        raise SelectorError(f"{_name(found[0])} is of dtype {found[0].leaf.dtype}; only floating values are changed")
    for item in floating:
        trouble = _trouble(item, how, catalog, lengths)
        if trouble is not None:
            others = [each for each in floating if anywhere and _spot(each) == _spot(item)]
            raise _with_call(trouble, [each for each in others if _trouble(each, how, catalog, lengths) is None])
        if selector.site in GRADIENTS:
            check_gradient(item, goal, catalog)
    return [ResolvedIntervention(item.point, item.leaf, how) for item in floating]


def resolve_objective(objective: Objective, catalog: Catalog, lengths: TextLengths | None = None) -> ResolvedObjective:
    """What gradients are of. SelectorError where the objective does not fit the model's output, or its layer's."""
    found = _target(objective, catalog)
    if objective.kind in CLASS_OBJECTIVES and objective.klass is None and objective.target is None:
        objective = replace(objective, klass="top")
    _check_objective(objective, found.leaf, lengths)
    return ResolvedObjective(found.point, found.leaf, objective)


def check_gradient(item: SelectorMatch, goal: ResolvedObjective | None, catalog: Catalog) -> None:
    """SelectorError where there is no gradient at a point: no objective, or none that depends on it row by row."""
    if goal is None:
        raise SelectorError(
            f"site {escape(item.point.site)} needs an objective to differentiate",
            hint='add "objective": {"kind": "logit", "class": "top"}',
        )
    if item.leaf.dtype not in FLOATS:
        raise SelectorError(f"{_name(item)} is of dtype {item.leaf.dtype}, which has no gradient")
    if item.leaf.row_axis is None:
        raise SelectorError(f"{_name(item)} is the same for all rows, so no row has a gradient of its own there")
    end = catalog.layers[goal.point.layer].calls[goal.point.call].output.order
    if catalog.layers[item.point.layer].calls[item.point.call].at(item.point.site).order > end:
        raise SelectorError(
            f"the objective does not depend on {_name(item)}, which runs later",
            hint="ask for the gradient at a layer before it",
        )


def _before_goal(items: list[SelectorMatch], goal: ResolvedObjective | None, catalog: Catalog) -> list[SelectorMatch]:
    """Of a layer's calls those that have a gradient; all of them where none has, and whoever checks them says why."""

    def has_gradient(item: SelectorMatch) -> bool:
        try:
            check_gradient(item, goal, catalog)
        except SelectorError:
            return False
        return True

    good = [item for item in items if has_gradient(item)]
    spots = {_spot(item) for item in good}
    return [item for item in items if item in good or _spot(item) not in spots]


def _spot(item: SelectorMatch) -> tuple[str, tuple[str, ...]]:
    """What the calls of a module have in common."""
    return item.point.layer, item.point.path


def _trouble(
    item: SelectorMatch, how: Operation, catalog: Catalog, lengths: TextLengths | None
) -> SelectorError | None:
    """Why a tensor is not changed that way."""
    several = len(catalog.layers[item.point.layer].calls) > 1
    call = f"#{item.point.call}" if several else ""
    name = escape(f"{item.point.layer}{call}{format_path(item.point.path)}")
    try:
        _check_numbers(name, item.leaf, how)
        _check_part(name, item.leaf, how, lengths)
    except SelectorError as error:
        return error
    return None


def _with_call(error: SelectorError, others: Sequence[SelectorMatch]) -> SelectorError:
    """The error with a call to name instead, the last of others."""
    if not others:
        return error
    point = others[-1].point
    return SelectorError(error.detail, hint=f"name one call: {escape(point.text.removesuffix(':output'))}")


def _target(objective: Objective, catalog: Catalog) -> SelectorMatch:
    """The tensor that an objective looks at: a layer's only output, or of the model's outputs the one that suits."""
    if objective.selector is not None:
        found, _ = find_matches(objective.selector, catalog)
        floating = [item for item in found if item.leaf.dtype in FLOATS and item.point.site == "output"]
        if len(floating) != 1:
            raise SelectorError(
                f"the objective's layer names {len(floating)} floating outputs", hint="name one: 'LAYER#0[path]'"
            )
        return floating[0]
    whole = catalog.layers["."]
    suiting = sorted((leaf for leaf in whole.calls[0].output.tensors if leaf.dtype in FLOATS), key=_unlike(objective))
    if not suiting:
        raise SelectorError("the model returns no floating tensor to differentiate", hint='use kind "layer"')
    return SelectorMatch("", HookPoint(".", 0, suiting[0].path, "output"), suiting[0], whole.type)


def _unlike(objective: Objective) -> Callable[[TensorInfo], tuple[bool, bool]]:
    """The order in which a model's outputs suit: logits by name, then by shape, then the first."""

    def key(leaf: TensorInfo) -> tuple[bool, bool]:
        return leaf.path != ("logits",), objective.kind in CLASS_OBJECTIVES and not _is_scores(leaf)

    return key


def _is_scores(leaf: TensorInfo) -> bool:
    return len(leaf.shape) == 2 and leaf.row_axis == 0 and leaf.entries_per_row == 1


def _check_objective(objective: Objective, leaf: TensorInfo, lengths: TextLengths | None) -> None:
    kind = objective.kind
    if leaf.row_axis is None:
        raise SelectorError("the objective's tensor is the same for all rows, so it gives none a number of its own")
    if (objective.selector is not None) != (kind == "layer"):
        hint = 'add "layer": "NAME"' if kind == "layer" else 'use "kind": "layer"'
        raise SelectorError(f"objective {escape(kind)} {'needs' if kind == 'layer' else 'takes no'} layer", hint=hint)
    if objective.channel is not None:
        own = _common(leaf, lengths)
        size = own.shape[leaf.layout.index("C")] if kind == "layer" and leaf.layout and "C" in leaf.layout else 0
        if not 0 <= objective.channel < size:
            raise SelectorError(
                f"the objective's channel must be between 0 and {size - 1}" if size else "there is no such channel"
            )
    if kind not in CLASS_OBJECTIVES:
        if objective.klass is not None or objective.target is not None:
            raise SelectorError(f"objective {escape(kind)} takes neither class nor target", hint="leave them out")
        return
    if not _is_scores(leaf):
        raise SelectorError(
            f"objective {escape(kind)} needs an output of shape (rows, classes), this model's has {list(leaf.shape)}",
            hint='use kind "sum", "mean" or "layer"',
        )
    _check_class(objective, leaf, lengths)


def _check_class(objective: Objective, leaf: TensorInfo, lengths: TextLengths | None) -> None:
    classes = _common(leaf, lengths).shape[1]
    if objective.target is not None:
        if objective.kind != "kl_div" or objective.klass is not None:
            raise SelectorError("'target' is for kind 'kl_div' alone, in place of a class", hint="give one of them")
        if leaf.token_axes and lengths is not None:  # a class for each token
            _check_shape("'target'", leaf, lengths, lambda own: own.shape[1:], (len(objective.target),))
        elif len(objective.target) != classes:
            raise SelectorError(f"'target' has {len(objective.target)} numbers, the model has {classes} classes")
        whole = sum(objective.target)
        if not (isfinite(whole) and min(objective.target) >= 0 and abs(whole - 1) <= SPREAD):
            raise SelectorError("'target' is no distribution", hint="numbers from 0 to 1 that add up to 1")
    elif isinstance(objective.klass, int) and not 0 <= objective.klass < classes:
        raise SelectorError(f"class {objective.klass} is out of range", hint=f"use 0 to {classes - 1}, or 'top'")


def _check_parameters(how: Operation) -> None:
    given = {name for name in PARAMETERS if vars(how)[name] is not None}
    allowed = {name for group in TAKES[how.op] for name in group} | set(OPTIONAL.get(how.op, ()))
    for name in sorted(given - allowed):
        raise SelectorError(
            f"op {escape(how.op)} takes no {escape(name)}",
            hint=f"it takes {_listed(sorted(allowed))}" if allowed else "leave it out",
        )
    for group in TAKES[how.op]:
        if not given & set(group):
            raise SelectorError(f"op {escape(how.op)} needs {_listed(group)}", hint=f'add "{group[0]}"')
    if {"value", "tensor"} <= given:
        raise SelectorError(f"op {escape(how.op)} takes a value or a tensor, not both")
    if how.min is not None and how.max is not None and how.min > how.max:
        raise SelectorError("'min' is larger than 'max'")
    if how.std is not None and how.std < 0:
        raise SelectorError("'std' is 0 or more")


def _check_numbers(name: str, leaf: TensorInfo, how: Operation) -> None:
    """SelectorError where the tensor's dtype does not hold a number: a kernel raises or makes it infinite."""
    largest = torch.finfo(DTYPES[leaf.dtype]).max
    for parameter in NUMBERS:
        number = vars(how)[parameter]
        if number is not None and not abs(number) <= largest:
            raise SelectorError(
                f"{parameter!r} is {number}, which {name} of dtype {leaf.dtype} does not hold",
                hint=f"use {-largest:g} to {largest:g}",
            )


def _check_part(name: str, leaf: TensorInfo, how: Operation, lengths: TextLengths | None) -> None:
    if leaf.mixed and leaf.row_axis is not None and (how.tensor is not None or how.op == "noise"):
        raise SelectorError(
            f"the rows of {name} do not stand one after the other, so none gets a tensor or noise of its own",
            hint="change another layer",
        )
    for option, letter, indices in (("channels", "C", how.channels), ("tokens", "T", how.tokens)):
        if indices is None:
            continue
        size = _size(name, _common(leaf, lengths), option, letter)
        if not indices or len(set(indices)) != len(indices) or not all(0 <= index < size for index in indices):
            raise SelectorError(f"{option!r} of {name} are different numbers between 0 and {size - 1}")
    if how.region is not None:
        top, left, bottom, right = how.region
        height, width = (_size(name, _common(leaf, lengths), "region", letter) for letter in "HW")
        if not (0 <= top < bottom <= height and 0 <= left < right <= width):
            raise SelectorError(
                f"'region' of {name} must lie within {height} by {width}",
                hint="write [top, left, bottom, right], the last two not included",
            )
    if how.tensor is not None:
        _check_shape(
            f"the tensor for {name}", leaf, lengths, lambda own: compute_part_shape(own, how), how.tensor.shape
        )


def _common(leaf: TensorInfo, lengths: TextLengths | None) -> TensorInfo:
    """A tensor with the tokens that every text of a request has."""
    return leaf if lengths is None else leaf.with_length(lengths.common)


def _check_shape(
    what: str, leaf: TensorInfo, lengths: TextLengths | None, part: Callable[[TensorInfo], Shape], given: Shape
) -> None:
    """SelectorError where what is sent for a part of every row does not have its shape."""
    if lengths is None:
        possible = {part(leaf)}
    elif lengths.known:
        most = lengths.most if leaf.row_axis is not None else lengths.together
        possible = {part(leaf.with_length(tokens)) for tokens in (lengths.fewest, most)}
    else:
        possible = {part(leaf.with_length(tokens)) for tokens in (*given, lengths.most) if tokens <= lengths.most}
    if lengths is not None and lengths.known and len(possible) > 1:
        sizes = f"have {lengths.fewest} to {lengths.most} tokens"
        raise SelectorError(
            f"{what} fits texts of one length, and these "
            + (sizes if lengths.fewest < lengths.most else "have them at different positions"),
            hint="send texts of one length in a request",
        )
    if given not in possible:
        raise SelectorError(f"{what} has shape {list(given)}", hint=f"send {_shown(leaf, part, lengths)}")


def _shown(leaf: TensorInfo, part: Callable[[TensorInfo], Shape], lengths: TextLengths | None) -> str:
    """The shape that is wanted; of a text whose length is not known yet it has T tokens."""
    if lengths is None or lengths.known:
        return str(list(part(_common(leaf, lengths))))
    sizes = zip(part(leaf.with_length(1)), part(leaf.with_length(2)), strict=True)
    shape = ", ".join(str(size) if size == other else "T" for size, other in sizes)
    return f"[{shape}]" + (", where T is how many tokens the text has" if "T" in shape else "")


def _size(name: str, leaf: TensorInfo, option: str, letter: str) -> int:
    if leaf.layout is None or letter not in leaf.layout:
        raise SelectorError(f"{name} has no axis for {option!r}", hint=f"leave {option!r} out")
    return leaf.shape[leaf.layout.index(letter)]


def _name(item: SelectorMatch) -> str:
    return escape(item.point.layer + format_path(item.point.path))


def _listed(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
