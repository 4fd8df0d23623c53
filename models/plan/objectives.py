"""Scalars to differentiate: a function and an entry of a table for each.

A function returns a number for each row, so that a row's gradient does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import kl_div, logsigmoid, one_hot

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.labels import Outputs
from layertap.models.plan.requested import LossReduction, Objective, ObjectiveKind, Terms


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` takes a request's rows in float32 or wider and returns a number for each row.

    ``of_classes``: it needs an output (rows, classes) and takes a class. ``layer``: whether it takes a layer's name
    instead of using the model's output. ``target``: what may be given instead of a class. ``takes_terms``: weighted
    classes or channels may be given too. ``compares``: it uses softmax, which is 1 for a single class.
    ``of_probabilities``: it uses probabilities, so it matters whether the model already returns them.
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
