"""Check captures: if they replace the layers' outputs in a second forward, all outputs must be the same.

A non-deterministic model can't be checked, and a model that writes to a layer's output through another variable
fails: the value that the forward continues with is not the one that left the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Catalog
from layertap.models.devices.memory import Inputs
from layertap.models.errors import Fault, RequestError, escape
from layertap.models.hooks.attach import Modules, attach_tensors
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.plan.plan import Capture, Plan, find_tensor, get_boundary
from layertap.models.plan.requested import Reduction
from layertap.models.points import Point
from layertap.models.run.batch_slices import BatchActivations, RequestSlice, find_span
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica
from layertap.models.run.resumption import Resumption

TOLERANCE = 1e-5  # of the largest number of a tensor; equal bits are expected
MAX_SEARCH = 16  # forwards to find out which layer it was
TensorsByPoint = Mapping[Point, Tensor]
# Runs a whole forward in which tensors are replaced; returns the replaced ones and the model's output.
RunWithReplacements = Callable[[TensorsByPoint], TensorsByPoint]


def run_verified(
    model: LoadedModel,
    replica: Replica,
    piece: Inputs,
    request_slice: RequestSlice,
    plan: Plan,
    catalog: Catalog,
    padded_rows: int | None = None,
    resumption: Resumption | None = None,
) -> BatchActivations:
    """``model.run`` for one request; RequestError if putting its captured outputs back changes the model's output."""
    count = request_slice.stop - request_slice.start
    rows = max(count, padded_rows or 0)
    whole = RequestSlice(0, rows, list_extra_captures(plan, catalog))
    activations = model.run(replica, [piece], [request_slice, whole], padded_rows, resumption)

    def run_again(values: TensorsByPoint) -> TensorsByPoint:
        with replica.kept():
            run_rows = partial(model.run_rows, replica, [piece], rows - count, resumption)
            return _run_with_replacements(replica.modules, run_rows, values)

    values = {capture.point: reduced.values for capture, reduced in activations.select(whole).items()}
    points = {each.point for each in plan.captures if each.point.site == "output"}
    in_order = sorted(points, key=lambda point: get_boundary(point, catalog).order)
    output = {each.point: values[each.point] for each in _list_model_outputs(catalog)}
    _check_outputs(output, {point: values[point] for point in in_order}, run_again)
    own = [(capture, find_span(capture, request_slice)) for capture in request_slice.captures]
    return BatchActivations({key: activations.pieces[key] for key in own})


def _run_with_replacements(
    modules: Modules, forward: Callable[[], object], values: TensorsByPoint
) -> dict[Point, Tensor]:
    """Run a whole forward in which the outputs of some calls are replaced.

    Returns the tensors of its output and the replaced ones. RequestError if the model keeps one of these where it
    can't be replaced.
    """
    replaced: dict[Point, Tensor] = {}

    def replace(point: Point, tensor: Tensor) -> Tensor:
        replaced[point] = tensor.clone()
        # In the original's memory order: in another, kernels round otherwise.
        return torch.empty_like(tensor).copy_(values[point])

    kept = KeptOutputs(modules["."])
    with ExitStack() as stack, torch.no_grad():
        attach_tensors(stack, modules, values, replace, kept)
        output = forward()
        outputs = {Point(".", 0, path, "output"): tensor.clone() for path, tensor in iterate_tensors(output)}
        del output
    if kept.has_lost_any():
        raise not_verified_error(
            "not verified: the model keeps a layer's output, and reads it where it can't be replaced",
            "ask for a layer after it, or leave 'verify' out",
        )
    return outputs | replaced


def check_possible(plan: Plan, catalog: Catalog) -> None:
    """RequestError if there is nothing to put back or nothing to compare."""
    if plan.resolved_interventions or plan.objective is not None:
        raise not_verified_error("'verify' is not offered beside interventions or gradients", "ask for it without them")
    if not any(capture.point.site == "output" for capture in plan.captures):
        raise not_verified_error(
            "'verify' puts outputs back, and no layer's output is asked for", "ask for one, or leave it out"
        )
    if not _list_model_outputs(catalog):
        raise not_verified_error("this model's output holds no tensor to compare", "leave 'verify' out")


def list_extra_captures(plan: Plan, catalog: Catalog) -> frozenset[Capture]:
    """What a forward must take beside the plan's own captures: each output as it is, and the model's own."""
    points = {each.point: each.info for each in plan.captures if each.point.site == "output"}
    raw = {Capture(each, find_tensor(each, catalog) or info, Reduction()) for each, info in points.items()}
    return frozenset(raw) | _list_model_outputs(catalog)


def _check_outputs(output: dict[Point, Tensor], replacements: dict[Point, Tensor], run: RunWithReplacements) -> None:
    """RequestError if outputs of layers, put back in another forward, do not give the model's ``output`` again."""
    difference = _compute_difference(output | replacements, run(replacements))
    if difference is None:
        return
    if _compute_difference(output, run({})) is not None:
        raise not_verified_error(
            "not verified: this model's output differs from one forward to the next", "leave 'verify' out of it"
        )
    for point, value in list(replacements.items())[:MAX_SEARCH]:
        alone = _compute_difference(output | {point: value}, run({point: value}))
        if alone is not None:
            name = escape(point.format_name(f"#{point.call}"))
            raise not_verified_error(
                f"not verified: with the output of {name} put back a forward differs by {alone:.1e}",
                "something may write to this output later under another name: ask for a layer after it",
            )
    raise not_verified_error(
        f"not verified: with all layers put back a forward differs by {difference:.1e}", "ask for fewer layers"
    )


def not_verified_error(detail: str, hint: str) -> RequestError:
    """The error of a request that is not verified."""
    return RequestError.from_faults([Fault(detail, hint, "/verify")])


def _list_model_outputs(catalog: Catalog) -> frozenset[Capture]:
    return frozenset(
        Capture(Point(".", 0, info.path, "output"), info, Reduction())
        for info in catalog.outputs
        if not info.dtype.startswith("complex")
    )


def _compute_difference(before: TensorsByPoint, after: TensorsByPoint) -> float | None:
    """The largest difference, None if all is equal within the tolerance."""
    worst = None
    for point, value in before.items():
        other = after[point].to(value.dtype) if point in after else value.new_empty(0)
        if value.shape != other.shape:
            return torch.inf
        if torch.equal(value, other):
            continue
        scale = float(value.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if value.is_floating_point() else 0.0
        if not torch.allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
            worst = max(worst or 0.0, float((value.double() - other.double()).abs().nan_to_num(torch.inf).amax()))
    return worst
