"""A warm plan's graphs beside the hooked forward: what they give must be the same within its precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.compiled.compile import WarmError
from layertap.models.compiled.plan_graphs import PlanGraphs
from layertap.models.devices.dtypes import TOLERANCE
from layertap.models.devices.threads import use_threads
from layertap.models.inputs.noise import make_noise
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
from layertap.models.selection.plan import Plan


def check_against_hooks(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, replica: Replica, counts: Sequence[int]
) -> None:
    """WarmError where a graph gives something else than hooks, for batches of so many rows, one after the other."""
    batch = make_noise(model.inputs, model.device, model.dtype)
    batches = []
    for rows in counts:
        place = torch.arange(rows, rows * 2, device=model.device)  # each batch begins with another row
        part = {name: value[place % len(value)] for name, value in batch.items()}
        batches.append((part, RequestSlice(0, rows, plan.captures)))
    with use_threads(model.threads):
        # All graphs first: what one gives must last while others run.
        results = [model.run(replica, [part], [share], graphs=graphs).select(share) for part, share in batches]
        expected = [model.run(replica, [part], [share]).select(share) for part, share in batches]
    for actual, wanted in zip(results, expected, strict=True):
        for capture in plan.captures:
            if not _is_close(actual[capture], wanted[capture], TOLERANCE[model.spec.precision]):
                raise WarmError(f"the compiled graph gives other numbers for {capture.point.layer}")


def _is_close(actual: ReducedTensor, expected: ReducedTensor, tolerance: float) -> bool:
    """Whether results are alike: integers exactly, floats within a tolerance, int8 within that and a step of its scale.

    ``tolerance`` is a part of the largest number.
    """
    found, wanted = actual.values, expected.values
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    step: float | Tensor = 0.0
    if expected.scale is not None and actual.scale is not None:
        step = _align(expected.scale, wanted)
        found, wanted = found * _align(actual.scale, found), wanted * step
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(found, wanted)
    limit = tolerance * (wanted.abs() + wanted.abs().amax()) + step
    same = (found == wanted) | (found.isnan() & wanted.isnan()) | ((found - wanted).abs() <= limit)
    return bool(same.all())


def _align(scale: Tensor, values: Tensor) -> Tensor:
    """Scales, one for each index of axis 0, beside values."""
    return scale.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim else scale
