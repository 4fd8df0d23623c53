"""Scalars to differentiate: a function and a row of a table for each.

A function gives numbers for each row, or their sum, so that a row's gradient is its own whatever shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import kl_div, one_hot

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.labels import Outputs
from layertap.models.selection.hook_points import LossReduction, Objective, ObjectiveKind, Terms


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` gets a request's rows in float32 or wider, and gives a number for each row.

    ``of_classes``: it needs an output (rows, classes), and takes a class. ``layer``: whether it takes the name of a
    layer in place of the model's output. ``target``: what may be given in place of a class. ``takes_terms``: so may
    several classes or channels with weights. ``compares``: it is by softmax, which is 1 for a lone class.
    ``of_probabilities``: it is of probabilities, so it matters whether the model's output is some already.
    ``reductions``: how a row's loss may be reduced over its classes, the default first; each row counts as a batch.
    """

    compute: Callable[[RowTensor, Objective], Tensor]
    of_classes: bool = False
    layer: Literal["refused", "optional", "needed"] = "refused"
    target: Literal["refused", "distribution", "values"] = "refused"
    takes_terms: bool = False
    compares: bool = False
    of_probabilities: bool = False
    reductions: tuple[LossReduction, ...] = ()


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
    return value.clamp_min(torch.finfo(value.dtype).tiny).log()  # that of 0 would make all gradients NaN


# Probabilities, and their logarithms, of what a model gives for classes.
_PROBABILITIES: Mapping[Outputs | None, Callable[[Tensor], Tensor]] = {
    None: lambda value: value.softmax(1),
    "probabilities": _keep,
    "log_probabilities": torch.exp,
}
_LOGARITHMS: Mapping[Outputs | None, Callable[[Tensor], Tensor]] = {
    None: lambda value: value.log_softmax(1),
    "probabilities": _take_logarithm,
    "log_probabilities": _keep,
}


def _choose_scores(rows: RowTensor, scores: Tensor, objective: Objective) -> Tensor:
    """Of scores (rows, classes) that of each row's class, or the weighted sum of several."""
    if isinstance(objective.klass, tuple):
        return _weigh(scores, objective.klass)
    return scores.gather(1, _get_classes(rows, objective)[:, None])


def _weigh(values: Tensor, terms: Terms) -> Tensor:
    """The weighted sum of some columns, for each row."""
    weights, columns = zip(*terms, strict=True)
    return (values[:, list(columns)] * values.new_tensor(weights)).sum(1)


def _make_target(rows: RowTensor, objective: Objective) -> Tensor:
    """A number for each row and class; the target of a class is one-hot."""
    if objective.target == "unedited":  # of the unedited row itself
        return make_target(rows.value, objective)
    if objective.target is not None:
        return rows.value.new_tensor(objective.target).expand_as(rows.value)
    return one_hot(_get_classes(rows, objective), rows.value.shape[1]).to(rows.value.dtype)


def make_target(scores: Tensor, objective: Objective) -> Tensor:
    """What an objective's target "unedited" is of the scores (rows, classes) of unedited rows."""
    is_distribution = OBJECTIVES[objective.kind].target == "distribution"
    return _PROBABILITIES[objective.outputs](scores) if is_distribution else scores


def _get_classes(rows: RowTensor, objective: Objective) -> Tensor:
    """A class for each row."""
    highest = rows.value.detach().float().argmax(1)  # as whoever reads the scores in a reply finds it
    return highest.fill_(objective.klass) if isinstance(objective.klass, int) else highest


OBJECTIVES: Mapping[ObjectiveKind, ObjectiveSpec] = {
    "logit": ObjectiveSpec(_logit, of_classes=True, takes_terms=True),
    "probability": ObjectiveSpec(_probability, of_classes=True, takes_terms=True, compares=True, of_probabilities=True),
    "binary": ObjectiveSpec(_binary, of_classes=True, takes_terms=True, of_probabilities=True),
    "cross_entropy": ObjectiveSpec(
        _cross_entropy,
        of_classes=True,
        target="distribution",
        compares=True,
        of_probabilities=True,
        reductions=("mean", "sum"),
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
