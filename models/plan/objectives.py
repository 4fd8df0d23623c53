"""Objectives, the scalars to differentiate: a function and an entry of a table for each.

A function returns a number for each row, so that a row's gradient does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import kl_div, logsigmoid, one_hot

from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.labels import Outputs
from layertap.models.plan.requested import LossReduction, Objective, ObjectiveKind, Terms


def compute_objective(rows: RowTensor, objective: Objective) -> Tensor:
    """The sum of an objective over a request's rows, in float32 or wider; padding is left out of each row.

    Divided by the number of inputs that it is the mean over.
    """
    parts = rows.strip() if rows.is_padded else (rows,)
    sums = [compute_objectives(each, objective).sum() for each in parts]
    total = torch.stack(sums).sum() if len(sums) > 1 else sums[0]
    return total / objective.over if isinstance(objective.over, int) else total


def compute_objectives(rows: RowTensor, objective: Objective) -> Tensor:
    """An objective for each row of a tensor without padding, (rows,), in float32 or wider."""
    rows = replace(rows, value=to_floating(rows.value)).at(objective.position)
    return OBJECTIVES[objective.kind].compute(rows, objective).flatten()


@dataclass(frozen=True)
class ObjectiveSpec:
    """A kind of objective; ``compute`` takes a request's rows in float32 or wider and returns a number for each row."""

    compute: Callable[[RowTensor, Objective], Tensor]
    takes: tuple[str, ...]  # options, beside a position
    compares: bool = False  # it uses softmax, which is 1 for a single class
    reductions: tuple[LossReduction, ...] = ()  # of a row's loss over its classes, the default first

    @property
    def of_classes(self) -> bool:
        """Whether it needs an output (rows, classes)."""
        return "class" in self.takes

    @property
    def of_probabilities(self) -> bool:
        """Whether it uses probabilities: what the model returns matters, and a target is a distribution."""
        return "outputs" in self.takes


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
    is_distribution = OBJECTIVES[objective.kind].of_probabilities
    return _PROBABILITIES[objective.outputs](scores) if is_distribution else scores


def _get_classes(rows: RowTensor, objective: Objective) -> Tensor:
    """A class for each row."""
    highest = rows.value.detach().float().argmax(1)  # the argmax of the float32 scores that a reply has
    return highest.fill_(objective.klass) if isinstance(objective.klass, int) else highest


OBJECTIVES: Mapping[ObjectiveKind, ObjectiveSpec] = {
    "logit": ObjectiveSpec(_logit, ("layer", "class", "terms")),
    "probability": ObjectiveSpec(_probability, ("layer", "class", "terms", "outputs"), compares=True),
    "binary": ObjectiveSpec(_binary, ("layer", "class", "terms", "outputs")),
    "cross_entropy": ObjectiveSpec(_cross_entropy, ("layer", "class", "target", "outputs"), True, ("mean", "sum")),
    "kl_div": ObjectiveSpec(_kl_div, ("layer", "class", "target", "outputs"), True, ("sum", "batchmean", "mean")),
    "mse": ObjectiveSpec(_mse, ("layer", "class", "target"), reductions=("mean", "sum")),
    "sum": ObjectiveSpec(_sum, ("layer",)),
    "mean": ObjectiveSpec(_mean, ("layer",)),
    "norm": ObjectiveSpec(_norm, ("layer",)),
    "layer": ObjectiveSpec(_layer, ("layer", "channel", "terms")),
}
