"""A plan's captures for rows that run in one forward or several, as a server's batches do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices.memory import Inputs
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Capture, Plan, check_rows_fit
from layertap.models.points import Point, Site
from layertap.models.run.batch_slices import JoinedRows, RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.reduction import Reduced, ReducedArray, ReducedTensor
from tests.oracle import Key, record


def list_tensors(catalog: Catalog, *sites: Site) -> list[tuple[Point, TensorInfo]]:
    """Every tensor of every call of every layer."""
    return [
        (Point(layer.name, number, info.path, site), info)
        for layer in catalog.layers.values()
        for number, call in enumerate(layer.calls)
        for site in sites
        for info in call.get_boundary(site).tensors
    ]


def see(model: LoadedModel, rows: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """What hooks with immediate copies see: one input goes in by position, several by name."""
    return record(model.module, *rows.values()) if len(rows) == 1 else record(model.module, **rows)


def extract_captures(
    modules: Modules, forward: Callable[[], object], captures: Iterable[Capture], rows: int
) -> dict[Capture, ReducedTensor]:
    """Each capture of a forward of so many rows, all of one request."""
    request_slice = RequestSlice(0, rows, frozenset(captures))
    return extract_slices(modules, forward, [request_slice], rows).select(request_slice)


def run_plan(module: nn.Module, x: Tensor, plan: Plan) -> dict[str, Tensor]:
    """What a plan gives of one forward of a plain module, by key."""
    share = RequestSlice(0, len(x), plan.captures, plan.resolved_interventions, plan.objective)
    taken = extract_slices(Modules(module), lambda: module(x.clone()), [share], len(x)).select(share)
    return {result.key: taken[result.capture].values for result in plan.results}


def extract_plan(
    model: LoadedModel, rows: Inputs, plan: Plan, catalog: Catalog, max_rows: int
) -> dict[Capture, ReducedTensor]:
    """All captures, on the host; rows beyond ``max_rows`` run in further forwards."""
    total = len(next(iter(rows.values())))
    size = check_rows_fit(plan, catalog, total, max_rows)
    joined, found = JoinedRows(total), dict[Capture, ReducedArray]()
    for start in reversed(range(0, total, size)):  # in whatever order parts come
        part = {name: value[start : start + size] for name, value in rows.items()}
        count = min(size, total - start)
        whole = RequestSlice(0, count, plan.captures, plan.resolved_interventions, plan.objective, start)
        taken = model.run(model.replicas[0], [part], [whole]).to_host().select(whole)
        found = joined.add(
            start,
            start + count,
            {capture: Reduced(*(part.numpy() for part in each.parts)) for capture, each in taken.items()},
        )
    return {capture: Reduced(*map(torch.from_numpy, each.parts)) for capture, each in found.items()}
