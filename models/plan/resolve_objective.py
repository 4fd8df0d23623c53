"""Look up a request's objective in a catalog: its tensor, its settings, and where it has gradients."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import POSITION_AXES, Position, describe_position, find_position_axes
from layertap.models.errors import SelectorError, escape
from layertap.models.labels import Outputs
from layertap.models.plan.matches import find_matches
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.plan import ResolvedObjective, Tap, get_boundary
from layertap.models.plan.requested import Objective, Terms
from layertap.models.plan.text_lengths import TextLengths, check_shape, with_common_length
from layertap.models.points import Point

SPREAD = 1e-3  # how far from 1 a target's probabilities may add up


def resolve_objective(objective: Objective, catalog: Catalog, lengths: TextLengths | None = None) -> ResolvedObjective:
    """The objective with its tensor. SelectorError if it does not fit the model's or the layer's output."""
    target = _find_tensor(objective, catalog)
    if OBJECTIVES[objective.kind].of_classes and objective.klass is None and objective.target is None:
        objective = replace(objective, klass="top")
    if OBJECTIVES[objective.kind].of_probabilities:
        outputs = objective.outputs or dict(catalog.traits.outputs).get(target.point.path)
        objective = replace(objective, outputs=None if outputs == "logits" else outputs)
    _check_objective(objective, target.info, catalog, lengths)
    if objective.reduction in OBJECTIVES[objective.kind].reductions[:1]:
        objective = replace(objective, reduction=None)  # one fingerprint for the default, named or not
    return ResolvedObjective(target.point, target.info, objective)


def find_outputs(catalog: Catalog) -> Outputs:
    """Whether the model's output has logits, probabilities or log probabilities for its classes."""
    info = _choose_output(catalog, Objective())
    return dict(catalog.traits.outputs).get(info.path, "logits") if info is not None else "logits"


def count_classes(catalog: Catalog) -> int | None:
    """How many classes the model's output scores for each row, token or pixel; None if it has no class axis."""
    info = _choose_output(catalog, Objective())
    info = describe_position(info, None) if info is not None else None
    return info.size("C") if info is not None and info.row_axis is not None and info.has_axis("C") else None


def check_gradient(tap: Tap, objective: ResolvedObjective | None, catalog: Catalog) -> None:
    """SelectorError if a point has no gradient: no objective is given, or it does not depend on the point by row."""
    if objective is None:
        raise SelectorError(
            f"site {escape(tap.point.site)} needs an objective to differentiate",
            hint='add "objective": {"kind": "logit", "class": "top"}',
        )
    name = escape(tap.point.format_name())
    if not tap.info.is_floating:
        raise SelectorError(f"{name} is of dtype {tap.info.dtype}, which has no gradient")
    if tap.info.row_axis is None:
        raise SelectorError(f"{name} {_describe_rowless(tap.info)}, so no row has a gradient of its own there")
    if get_boundary(tap.point, catalog).order > get_boundary(objective.point, catalog).order:
        raise SelectorError(
            f"the objective does not depend on {name}, which runs later",
            hint="ask for the gradient at a layer before it",
        )


def _find_tensor(objective: Objective, catalog: Catalog) -> Tap:
    """The tensor that an objective is computed from: a layer's only output, or the best of the model's outputs."""
    if objective.selector is not None:
        matches, _ = find_matches(objective.selector, catalog)
        floating = [match for match in matches if match.info.is_floating and match.point.site == "output"]
        if len(floating) != 1:
            raise SelectorError(
                f"the objective's layer names {len(floating)} floating outputs", hint="name one: 'LAYER#0[path]'"
            )
        return floating[0]
    info = _choose_output(catalog, objective)
    if info is None:
        raise SelectorError("the model returns no floating tensor to differentiate", hint='use kind "layer"')
    return Tap(Point(".", 0, info.path, "output"), info)


def _choose_output(catalog: Catalog, objective: Objective) -> TensorInfo | None:
    """The model's floating output named ``logits``, else one shaped like scores, else the first; None without any."""
    outputs = [info for info in catalog.outputs if info.is_floating]
    of_classes = OBJECTIVES[objective.kind].of_classes

    def rank(info: TensorInfo) -> tuple[bool, bool]:
        return info.path != ("logits",), of_classes and not _is_scores(describe_position(info, objective.position))

    return min(outputs, key=rank, default=None)


def _is_scores(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and info.row_axis == 0 and info.entries_per_row == 1


def _check_objective(objective: Objective, info: TensorInfo, catalog: Catalog, lengths: TextLengths | None) -> None:
    kind, spec = escape(objective.kind), OBJECTIVES[objective.kind]
    if info.row_axis is None:
        raise SelectorError(f"the objective's tensor {_describe_rowless(info)}, so no row has a value of its own")
    if spec.layer != "optional" and (objective.selector is not None) != (spec.layer == "needed"):
        needed = spec.layer == "needed"
        hint = 'add "layer": "NAME"' if needed else 'use "kind": "layer"'
        raise SelectorError(f"objective {kind} {'needs a' if needed else 'takes no'} layer", hint=hint)
    if isinstance(objective.klass, tuple) and spec.of_classes and not spec.takes_terms:
        raise SelectorError(f"objective {kind} takes no terms", hint='use "kind": "logit", or "target"')
    if objective.reduction is not None and objective.reduction not in spec.reductions:
        known = ", ".join(map(repr, spec.reductions))
        hint = f"use one of {known}" if known else "leave it out: reductions are of losses"
        raise SelectorError(f"objective {kind} has no reduction {escape(objective.reduction)}", hint=hint)
    if objective.outputs is not None and not spec.of_probabilities:
        raise SelectorError(f"objective {kind} is of no probabilities, so it takes no 'outputs'", hint="leave it out")
    if objective.position is not None:
        _check_position(objective.position, info, catalog, lengths)
    info = describe_position(info, objective.position)
    if objective.channel is not None and catalog.sizes_known:
        for channel in _list_indices(objective.channel):
            _check_channel(channel, info if spec.layer == "needed" else None, lengths)
    if spec.of_classes:
        if not _is_scores(info):
            raise SelectorError(
                f"objective {kind} needs an output of shape (rows, classes), this model's has {list(info.shape)}",
                hint="; or ".join([*_offer_positions(info), 'use kind "sum", "mean" or "layer"']),
            )
        _check_target(objective)
        if catalog.sizes_known:
            _check_classes(objective, info, lengths)
    elif objective.klass is not None or objective.target is not None:
        raise SelectorError(f"objective {kind} takes no class, terms or target", hint="leave them out")


def _describe_rowless(info: TensorInfo) -> str:
    """Why a tensor has no row axis."""
    return "is made of all rows of a forward together" if info.crosses_rows else "is the same for all rows"


def _list_indices(chosen: int | Terms) -> tuple[int, ...]:
    """The class or channel, or each of the weighted ones."""
    return (chosen,) if isinstance(chosen, int) else tuple(index for _, index in chosen)


def _check_channel(channel: int, info: TensorInfo | None, lengths: TextLengths | None) -> None:
    """``info`` is the layer's tensor, None if the objective takes no layer."""
    size = with_common_length(info, lengths).size("C") if info is not None and info.has_axis("C") else 0
    if not -size <= channel < size:
        raise SelectorError(
            f"the objective's channel must be between {-size} and {size - 1}" if size else "there is no such channel"
        )


def _check_position(position: Position, info: TensorInfo, catalog: Catalog, lengths: TextLengths | None) -> None:
    axes = find_position_axes(info, position)
    if axes is None:
        what = "tokens, of which 'position' is one" if len(position) == 1 else "rows and columns, of which it is a pair"
        hint = "; or ".join([*_offer_positions(info), "leave it out"])
        raise SelectorError(f"the objective's tensor, {list(info.shape)}, has no {what}", hint=hint)
    sizes = [with_common_length(info, lengths).shape[axis] for axis in axes]
    if catalog.sizes_known and not all(-size <= index < size for index, size in zip(position, sizes, strict=True)):
        ranges = " and ".join(f"between {-size} and {size - 1}" for size in sizes)
        raise SelectorError(f"the objective's position must be {ranges}")


def _offer_positions(info: TensorInfo) -> list[str]:
    """A hint for each kind of position that the tensor has."""
    examples = {1: 'add "position": -1, a token', 2: 'add "position": [0, 0], a row and a column'}
    return [examples[numbers] for numbers in POSITION_AXES if find_position_axes(info, (0,) * numbers) is not None]


def _check_target(objective: Objective) -> None:
    """The checks of a target that do not need the number of classes."""
    if objective.target is None:
        return
    allowed = OBJECTIVES[objective.kind].target
    if allowed == "refused" or objective.klass is not None:
        kinds = ", ".join(repr(kind) for kind, spec in OBJECTIVES.items() if spec.target != "refused")
        raise SelectorError(f"'target' is for kinds {kinds}, in place of a class", hint="give one of them")
    if objective.target == "unedited":
        return
    total = sum(objective.target)
    if allowed == "distribution" and not (
        isfinite(total) and min(objective.target, default=-1.0) >= 0 and abs(total - 1) <= SPREAD
    ):
        raise SelectorError("'target' is not a probability distribution", hint="numbers from 0 to 1 that add up to 1")


def _check_classes(objective: Objective, info: TensorInfo, lengths: TextLengths | None) -> None:
    classes = with_common_length(info, lengths).shape[1]
    if classes == 1 and OBJECTIVES[objective.kind].compares and objective.outputs is None:
        raise SelectorError(
            f"objective {escape(objective.kind)} is the same for every input: the output has a single score",
            hint='use kind "logit", the score itself, or "binary", its sigmoid',
        )
    if isinstance(objective.target, tuple):
        if info.token_axes and lengths is not None:  # a class for each token
            check_shape("'target'", info, lengths, lambda part: part.shape[1:], (len(objective.target),))
        elif len(objective.target) != classes:
            raise SelectorError(f"'target' has {len(objective.target)} numbers, the model has {classes} classes")
    elif isinstance(objective.klass, int | tuple):
        for klass in _list_indices(objective.klass):
            if not 0 <= klass < classes:
                raise SelectorError(f"class {klass} is out of range", hint=f"use 0 to {classes - 1}, or 'top'")
