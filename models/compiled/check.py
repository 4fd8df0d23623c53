"""A warm plan's graphs beside the hooked forward: what they give must be the same within its precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.compiled.compile import WarmError
from layertap.models.compiled.plan_graphs import PlanGraphs
from layertap.models.devices.threads import use_threads
from layertap.models.inputs.noise import make_noise
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
from layertap.models.selection.plan import Plan

TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}  # of a capture's largest number


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
            if not _is_close(actual[capture].values, wanted[capture].values, TOLERANCE[model.spec.precision]):
                raise WarmError(f"the compiled graph gives other numbers for {capture.point.layer}")


def _is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return bool((actual.int() - expected.int()).abs().amax() <= 1)
    largest = float(expected.abs().amax())
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
