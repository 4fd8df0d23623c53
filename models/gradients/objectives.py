"""Scalars to differentiate: one number for each row, so that a row's gradient is its own whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layertap.models.capture.reduction import move_rows_first
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.padding import is_padded, strip_padding
from layertap.models.selection.hook_points import Objective

CLASS_OBJECTIVES = frozenset({"logit", "probability", "cross_entropy", "kl_div"})  # kinds that need (rows, classes)


def compute_objective(rows: Tensor, leaf: TensorInfo, objective: Objective, real: Tensor | None = None) -> Tensor:
    """The sum of the objective over a request's rows, in float32 or wider; ``rows`` is their part of a tensor.

    ``real`` (rows, tokens) is False where a token only pads its row: each row's is that of the row without it.
    """
    values = rows if rows.dtype is torch.float64 else rows.float()
    score = OBJECTIVES[objective.kind]
    if real is None or not is_padded(leaf, real):
        return score(values, leaf, objective).sum()
    return torch.stack([score(row, own, objective).sum() for row, own in strip_padding(values, leaf, real)]).sum()


def _logit(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    return values.gather(1, _classes(values, objective)[:, None])


def _probability(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    return values.softmax(1).gather(1, _classes(values, objective)[:, None])


def _cross_entropy(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    return torch.nn.functional.cross_entropy(values, _classes(values, objective), reduction="sum")


def _kl_div(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    """KL(target ‖ softmax(logits)); the target of a class is one-hot."""
    if objective.target is not None:
        target = torch.tensor(objective.target, device=values.device, dtype=values.dtype).expand_as(values)
    else:
        target = torch.nn.functional.one_hot(_classes(values, objective), values.shape[1]).to(values.dtype)
    return torch.nn.functional.kl_div(values.log_softmax(1), target, reduction="sum")


def _sum(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    return values.sum()


def _mean(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    return move_rows_first(values, leaf).values.flatten(1).mean(1)


def _layer(values: Tensor, leaf: TensorInfo, objective: Objective) -> Tensor:
    if objective.channel is None:
        return _mean(values, leaf, objective)
    return move_rows_first(values, leaf).positions(0)[:, objective.channel].mean(1)


def _classes(values: Tensor, objective: Objective) -> Tensor:
    """A class for each row."""
    if isinstance(objective.klass, int):
        return torch.full((len(values),), objective.klass, device=values.device)
    return values.detach().float().argmax(1)  # as whoever reads the scores in a reply finds it


OBJECTIVES: dict[str, Callable[[Tensor, TensorInfo, Objective], Tensor]] = {
    "logit": _logit,
    "probability": _probability,
    "cross_entropy": _cross_entropy,
    "kl_div": _kl_div,
    "sum": _sum,
    "mean": _mean,
    "layer": _layer,
}
