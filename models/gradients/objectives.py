"""Scalars to differentiate: a function and a row of a table for each.

A function gives numbers for each row, or their sum, so that a row's gradient is its own whatever shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy, kl_div, one_hot

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.selection.hook_points import Objective, ObjectiveKind, Terms


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` gets a request's rows in float32 or wider.

    ``of_classes``: it needs an output (rows, classes), and takes a class. ``layer``: whether it takes the name of a
    layer in place of the model's output. ``target``: what may be given in place of a class. ``takes_terms``: so may
    several classes or channels with weights. ``compares``: it is by softmax, which is 1 for a lone class.
    """

    compute: Callable[[RowTensor, Objective], Tensor]
    of_classes: bool = False
    layer: Literal["refused", "optional", "needed"] = "refused"
    target: Literal["refused", "distribution", "values"] = "refused"
    takes_terms: bool = False
    compares: bool = False


def _logit(rows: RowTensor, objective: Objective) -> Tensor:
    return _choose_scores(rows, rows.value, objective)


def _probability(rows: RowTensor, objective: Objective) -> Tensor:
    return _choose_scores(rows, rows.value.softmax(1), objective)


def _binary(rows: RowTensor, objective: Objective) -> Tensor:
    return _choose_scores(rows, rows.value.sigmoid(), objective)


def _cross_entropy(rows: RowTensor, objective: Objective) -> Tensor:
    target = _get_classes(rows, objective) if objective.target is None else _make_target(rows, objective)
    return cross_entropy(rows.value, target, reduction="sum")


def _kl_div(rows: RowTensor, objective: Objective) -> Tensor:
    """KL(target ‖ softmax(logits))."""
    return kl_div(rows.value.log_softmax(1), _make_target(rows, objective), reduction="sum")


def _mse(rows: RowTensor, objective: Objective) -> Tensor:
    return (rows.value - _make_target(rows, objective)).square().mean(1)


def _sum(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.value.sum()


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
    if objective.target is not None:
        return rows.value.new_tensor(objective.target).expand_as(rows.value)
    return one_hot(_get_classes(rows, objective), rows.value.shape[1]).to(rows.value.dtype)


def _get_classes(rows: RowTensor, objective: Objective) -> Tensor:
    """A class for each row."""
    highest = rows.value.detach().float().argmax(1)  # as whoever reads the scores in a reply finds it
    return highest.fill_(objective.klass) if isinstance(objective.klass, int) else highest


OBJECTIVES: Mapping[ObjectiveKind, ObjectiveSpec] = {
    "logit": ObjectiveSpec(_logit, of_classes=True, takes_terms=True),
    "probability": ObjectiveSpec(_probability, of_classes=True, takes_terms=True, compares=True),
    "binary": ObjectiveSpec(_binary, of_classes=True, takes_terms=True),
    "cross_entropy": ObjectiveSpec(_cross_entropy, of_classes=True, target="distribution", compares=True),
    "kl_div": ObjectiveSpec(_kl_div, of_classes=True, target="distribution", compares=True),
    "mse": ObjectiveSpec(_mse, of_classes=True, target="values"),
    "sum": ObjectiveSpec(_sum, layer="optional"),
    "mean": ObjectiveSpec(_mean, layer="optional"),
    "norm": ObjectiveSpec(_norm, layer="optional"),
    "layer": ObjectiveSpec(_layer, layer="needed", takes_terms=True),
}
