"""Objectives, the scalars to differentiate: a function and an entry of a table for each, and where a model has them.

A function returns a number for each row, so that a row's gradient does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import kl_div, logsigmoid, one_hot

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import POSITION_AXES, RowTensor, describe_position, find_position_axes
from layertap.models.errors import SelectorError, escape
from layertap.models.labels import Outputs
from layertap.models.plan.matches import find_matches
from layertap.models.plan.options import TextLengths, check_need, check_range, check_shape, with_common_length
from layertap.models.plan.plan import ResolvedObjective, Tap, get_boundary
from layertap.models.plan.requested import LossReduction, Objective, ObjectiveKind, Terms
from layertap.models.points import Point

SPREAD = 1e-3  # how far from 1 a target's probabilities may add up


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` takes a request's rows in float32 or wider and returns a number for each row."""

    compute: Callable[[RowTensor, Objective], Tensor]
    of_classes: bool = False  # it needs an output (rows, classes) and takes a class
    layer: Literal["refused", "optional", "needed"] = "refused"  # a layer's name, instead of the model's output
    target: Literal["refused", "distribution", "values"] = "refused"  # instead of a class
    takes_terms: bool = False  # weighted classes or channels may be given too
    compares: bool = False  # it uses softmax, which is 1 for a single class
    of_probabilities: bool = False  # so it matters whether the model already returns them
    reductions: tuple[LossReduction, ...] = ()  # of a row's loss over its classes, the default first


def _logit(rows: RowTensor, objective: Objective) -> Tensor:
    return _choose_scores(rows, rows.value, objective)


def _probability(rows: RowTensor, objective: Objective) -> Tensor:
    return _choose_scores(rows, _PROBABILITIES[objective.outputs](rows.value), objective)


def _binary(rows: RowTensor, objective: Objective) -> Tensor:
    compute = _PROBABILITIES[objective.outputs] if objective.outputs else torch.sigmoid
    return _choose_scores(rows, compute(rows.value), objective)


def _cross_entropy(rows: RowTensor, objective: Objective) -> Tensor:
    logarithms = _LOGARITHMS[objective.outputs](rows.value)
    if objective.target is None:
        return -_choose_scores(rows, logarithms, objective)
    return -(logarithms * _make_target(rows, objective)).sum(1)


def _kl_div(rows: RowTensor, objective: Objective) -> Tensor:
    """KL(target ‖ probabilities)."""
    scale = rows.value.shape[1] if objective.reduction == "mean" else 1
    logarithms = _LOGARITHMS[objective.outputs](rows.value)
    return kl_div(logarithms, _make_target(rows, objective), reduction="none").sum(1) / scale


def _mse(rows: RowTensor, objective: Objective) -> Tensor:
    squares = (rows.value - _make_target(rows, objective)).square()
    return squares.sum(1) if objective.reduction == "sum" else squares.mean(1)


def _sum(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.group().flatten(1).sum(1)


def _mean(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.group().flatten(1).mean(1)


def _norm(rows: RowTensor, objective: Objective) -> Tensor:
    norm: Tensor = vector_norm(rows.group().flatten(1), dim=1)
    return norm


def _layer(rows: RowTensor, objective: Objective) -> Tensor:
    if objective.channel is None:
        return _mean(rows, objective)
    if isinstance(objective.channel, tuple):
        return _weigh(rows.positions().mean(2), objective.channel)
    return rows.positions()[:, objective.channel].mean(1)


def _keep(value: Tensor) -> Tensor:
    return value


def _take_logarithm(value: Tensor) -> Tensor:
    return value.clamp_min(torch.finfo(value.dtype).tiny).log()  # log(0) would make all gradients NaN


# From what a model returns for classes to probabilities, and to their logarithms.
_PROBABILITIES: Mapping[Outputs | None, Callable[[Tensor], Tensor]] = {
    None: lambda value: value.softmax(1),
    "multi_label_logits": torch.sigmoid,
    "probabilities": _keep,
    "log_probabilities": torch.exp,
}
_LOGARITHMS: Mapping[Outputs | None, Callable[[Tensor], Tensor]] = {
    None: lambda value: value.log_softmax(1),
    "multi_label_logits": logsigmoid,
    "probabilities": _take_logarithm,
    "log_probabilities": _keep,
}


def _choose_scores(rows: RowTensor, scores: Tensor, objective: Objective) -> Tensor:
    """The score of each row's class, or the weighted sum of several; ``scores`` are (rows, classes)."""
    if isinstance(objective.klass, tuple):
        return _weigh(scores, objective.klass)
    return scores.gather(1, _get_classes(rows, objective)[:, None])


def _weigh(values: Tensor, terms: Terms) -> Tensor:
    """The weighted sum of some columns, for each row."""
    weights, columns = zip(*terms, strict=True)
    return (values[:, list(columns)] * values.new_tensor(weights)).sum(1)


def _make_target(rows: RowTensor, objective: Objective) -> Tensor:
    """A number for each row and class; the target of a class is one-hot."""
    if objective.target == "unedited":  # these rows are the unedited ones
        return make_target(rows.value, objective)
    if objective.target is not None:
        return rows.value.new_tensor(objective.target).expand_as(rows.value)
    return one_hot(_get_classes(rows, objective), rows.value.shape[1]).to(rows.value.dtype)


def make_target(scores: Tensor, objective: Objective) -> Tensor:
    """The target that "unedited" stands for, computed from the scores (rows, classes) of unedited rows."""
    is_distribution = OBJECTIVES[objective.kind].target == "distribution"
    return _PROBABILITIES[objective.outputs](scores) if is_distribution else scores


def _get_classes(rows: RowTensor, objective: Objective) -> Tensor:
    """A class for each row."""
    highest = rows.value.detach().float().argmax(1)  # the argmax of the float32 scores that a reply has
    return highest.fill_(objective.klass) if isinstance(objective.klass, int) else highest


OBJECTIVES: Mapping[ObjectiveKind, ObjectiveSpec] = {
    "logit": ObjectiveSpec(_logit, of_classes=True, takes_terms=True),
    "probability": ObjectiveSpec(_probability, of_classes=True, takes_terms=True, compares=True, of_probabilities=True),
    "binary": ObjectiveSpec(_binary, of_classes=True, takes_terms=True, of_probabilities=True),
    "cross_entropy": ObjectiveSpec(
        _cross_entropy, True, target="distribution", compares=True, of_probabilities=True, reductions=("mean", "sum")
    ),
    "kl_div": ObjectiveSpec(
        _kl_div,
        of_classes=True,
        target="distribution",
        compares=True,
        of_probabilities=True,
        reductions=("sum", "batchmean", "mean"),
    ),
    "mse": ObjectiveSpec(_mse, of_classes=True, target="values", reductions=("mean", "sum")),
    "sum": ObjectiveSpec(_sum, layer="optional"),
    "mean": ObjectiveSpec(_mean, layer="optional"),
    "norm": ObjectiveSpec(_norm, layer="optional"),
    "layer": ObjectiveSpec(_layer, layer="needed", takes_terms=True),
}


def resolve_objective(objective: Objective, catalog: Catalog, lengths: TextLengths | None = None) -> ResolvedObjective:
    """The objective with its tensor. SelectorError if it does not fit the model's or the layer's output."""
    tap, spec = _find_tap(objective, catalog), OBJECTIVES[objective.kind]
    if spec.of_classes and objective.klass is None and objective.target is None:
        objective = replace(objective, klass="top")
    if spec.of_probabilities:
        outputs = objective.outputs or dict(catalog.traits.outputs).get(tap.point.path)
        objective = replace(objective, outputs=None if outputs == "logits" else outputs)
    _check_options(objective, tap.info)
    info = _check_position(objective, tap.info, catalog, lengths)
    if spec.of_classes:
        _check_classes(objective, info, catalog, lengths)
    if objective.reduction in spec.reductions[:1]:
        objective = replace(objective, reduction=None)  # one fingerprint for the default, named or not
    return ResolvedObjective(tap.point, tap.info, objective)


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
    check_need("gradient", name, tap.info)
    if get_boundary(tap.point, catalog).order > get_boundary(objective.point, catalog).order:
        raise SelectorError(
            f"the objective does not depend on {name}, which runs later",
            hint="ask for the gradient at a layer before it",
        )


def _find_tap(objective: Objective, catalog: Catalog) -> Tap:
    """The tensor that an objective is computed from: a layer's only output, or the best of the model's outputs."""
    if objective.selector is not None:
        taps, _ = find_matches(objective.selector, catalog)
        floating = [tap for tap in taps if tap.info.is_floating and tap.point.site == "output"]
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


def _check_options(objective: Objective, info: TensorInfo) -> None:
    """SelectorError if an objective has options that its kind does not take, or lacks one that it needs."""
    kind, spec = escape(objective.kind), OBJECTIVES[objective.kind]
    check_need("objective", "the objective's tensor", info)
    if spec.layer != "optional" and (objective.selector is not None) != (spec.layer == "needed"):
        needed = spec.layer == "needed"
        hint = 'add "layer": "NAME"' if needed else 'use "kind": "layer"'
        raise SelectorError(f"objective {kind} {'needs a' if needed else 'takes no'} layer", hint=hint)
    if objective.channel is not None and spec.layer != "needed":
        raise SelectorError(f"objective {kind} takes no channel", hint="leave it out")
    if isinstance(objective.klass, tuple) and spec.of_classes and not spec.takes_terms:
        raise SelectorError(f"objective {kind} takes no terms", hint='use "kind": "logit", or "target"')
    if objective.reduction is not None and objective.reduction not in spec.reductions:
        known = ", ".join(map(repr, spec.reductions))
        hint = f"use one of {known}" if known else "leave it out: reductions are of losses"
        raise SelectorError(f"objective {kind} has no reduction {escape(objective.reduction)}", hint=hint)
    if objective.outputs is not None and not spec.of_probabilities:
        raise SelectorError(f"objective {kind} is of no probabilities, so it takes no 'outputs'", hint="leave it out")
    if not spec.of_classes and (objective.klass is not None or objective.target is not None):
        raise SelectorError(f"objective {kind} takes no class, terms or target", hint="leave them out")
    if objective.target is None:
        return
    if spec.target == "refused" or objective.klass is not None:
        kinds = ", ".join(repr(kind) for kind, each in OBJECTIVES.items() if each.target != "refused")
        raise SelectorError(f"'target' is for kinds {kinds}, in place of a class", hint="give one of them")
    if spec.target == "distribution" and objective.target != "unedited":
        total = sum(objective.target)
        if not (isfinite(total) and min(objective.target, default=-1.0) >= 0 and abs(total - 1) <= SPREAD):
            hint = "numbers from 0 to 1 that add up to 1"
            raise SelectorError("'target' is not a probability distribution", hint=hint)


def _check_position(
    objective: Objective, info: TensorInfo, catalog: Catalog, lengths: TextLengths | None
) -> TensorInfo:
    """The tensor at the objective's position; SelectorError if it has none, or not the objective's channels there."""
    position, name = objective.position, "the objective's tensor"
    if position is not None:
        axes = find_position_axes(info, position)
        if axes is None:
            what = {1: "tokens: 'position' is one"}.get(len(position), "rows and columns: 'position' is a pair")
            hint = "; or ".join([*_offer_positions(info), "leave it out"])
            raise SelectorError(f"{name}, {list(info.shape)}, has no {what}", hint=hint)
        sizes = with_common_length(info, lengths).shape
        for axis, index in zip(axes, position, strict=True) if catalog.sizes_known else ():
            check_range("position", name, sizes[axis], (index,))
    info = describe_position(info, position)
    if objective.channel is not None and catalog.sizes_known:
        check_need("channels", name, info)
        check_range("channel", name, with_common_length(info, lengths).size("C"), _list_indices(objective.channel))
    return info


def _check_classes(objective: Objective, info: TensorInfo, catalog: Catalog, lengths: TextLengths | None) -> None:
    kind = escape(objective.kind)
    if not _is_scores(info):
        raise SelectorError(
            f"objective {kind} needs an output of shape (rows, classes), this model's has {list(info.shape)}",
            hint="; or ".join([*_offer_positions(info), 'use kind "sum", "mean" or "layer"']),
        )
    if not catalog.sizes_known:
        return
    classes = with_common_length(info, lengths).shape[1]
    if classes == 1 and OBJECTIVES[objective.kind].compares and objective.outputs is None:
        raise SelectorError(
            f"objective {kind} is the same for every input: the output has a single score",
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


def _list_indices(chosen: int | Terms) -> tuple[int, ...]:
    """The class or channel, or each of the weighted ones."""
    return (chosen,) if isinstance(chosen, int) else tuple(index for _, index in chosen)


def _offer_positions(info: TensorInfo) -> list[str]:
    """A hint for each kind of position that the tensor has."""
    examples = {1: 'add "position": -1, a token', 2: 'add "position": [0, 0], a row and a column'}
    return [examples[numbers] for numbers in POSITION_AXES if find_position_axes(info, (0,) * numbers) is not None]
