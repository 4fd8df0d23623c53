"""Scalars to differentiate: a function and a row of a table for each.

A function gives numbers for each row, or their sum, so that a row's gradient is its own whatever shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, one_hot

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.selection.hook_points import Objective, ObjectiveKind


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` gets a request's rows in float32 or wider.

    ``of_classes``: it needs an output (rows, classes), and takes a class. ``of_layer``: it needs the name of a layer.
    ``takes_target``: a distribution may be given in place of a class. ``compares``: it is by softmax, which is 1 for a
    lone class.
    """

    compute: Callable[[RowTensor, Objective], Tensor]
    of_classes: bool = False
    of_layer: bool = False
    takes_target: bool = False
    compares: bool = False


def _logit(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.value.gather(1, _get_classes(rows, objective)[:, None])


def _probability(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.value.softmax(1).gather(1, _get_classes(rows, objective)[:, None])


def _binary(rows: RowTensor, objective: Objective) -> Tensor:
    return _logit(rows, objective).sigmoid()


def _cross_entropy(rows: RowTensor, objective: Objective) -> Tensor:
    return cross_entropy(rows.value, _get_classes(rows, objective), reduction="sum")


def _kl_div(rows: RowTensor, objective: Objective) -> Tensor:
    """KL(target ‖ softmax(logits)); the target of a class is one-hot."""
    if objective.target is not None:
        target = rows.value.new_tensor(objective.target).expand_as(rows.value)
    else:
        target = one_hot(_get_classes(rows, objective), rows.value.shape[1]).to(rows.value.dtype)
    return kl_div(rows.value.log_softmax(1), target, reduction="sum")


def _sum(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.value.sum()


def _mean(rows: RowTensor, objective: Objective) -> Tensor:
    return rows.group().flatten(1).mean(1)


def _layer(rows: RowTensor, objective: Objective) -> Tensor:
    if objective.channel is None:
        return _mean(rows, objective)
    return rows.positions()[:, objective.channel].mean(1)


def _get_classes(rows: RowTensor, objective: Objective) -> Tensor:
    """A class for each row."""
    highest = rows.value.detach().float().argmax(1)  # as whoever reads the scores in a reply finds it
    return highest.fill_(objective.klass) if isinstance(objective.klass, int) else highest


OBJECTIVES: Mapping[ObjectiveKind, ObjectiveSpec] = {
    "logit": ObjectiveSpec(_logit, of_classes=True),
    "probability": ObjectiveSpec(_probability, of_classes=True, compares=True),
    "binary": ObjectiveSpec(_binary, of_classes=True),
    "cross_entropy": ObjectiveSpec(_cross_entropy, of_classes=True, compares=True),
    "kl_div": ObjectiveSpec(_kl_div, of_classes=True, takes_target=True, compares=True),
    "sum": ObjectiveSpec(_sum),
    "mean": ObjectiveSpec(_mean),
    "layer": ObjectiveSpec(_layer, of_layer=True),
}
