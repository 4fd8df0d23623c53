"""Look up a request's interventions in a catalog: the tensors to change, and those taken from other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import InputError, SelectorError, escape
from layertap.models.plan.matches import check_matches, find_matches, format_point
from layertap.models.plan.objectives import check_gradient
from layertap.models.plan.operations import OPERATIONS, compute_part_shape
from layertap.models.plan.options import (
    TextLengths,
    check_indices,
    check_need,
    check_shape,
    with_common_length,
)
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective, Tap, get_call
from layertap.models.plan.projections import NO_PROJECTIONS, Projections, check_projection, find_projection
from layertap.models.plan.requested import Intervention, Operation, Reduction, TensorData
from layertap.models.points import AXES, EDITABLE, GRADIENTS

PARAMETERS = ("by", "value", "min", "max", "std", "seed", "tensor", "project")
NUMBERS = ("by", "value", "min", "max", "std")


def resolve_intervention(
    intervention: Intervention,
    objective: ResolvedObjective | None,
    catalog: Catalog,
    lengths: TextLengths | None = None,
    projections: Projections = NO_PROJECTIONS,
) -> list[ResolvedIntervention]:
    """The changes of an intervention, one for each tensor that its selector names; without a call at every call.

    A gradient without a named call is changed at the calls that the objective depends on. UnknownLayerError or
    SelectorError for a site that can't be changed, parameters that the operation does not take, or a part that a
    tensor does not have.
    """
    operation, selector = find_projection(intervention.operation, projections), intervention.selector
    if selector.site not in EDITABLE:
        hint = f"use {_join_names(sorted(EDITABLE))}"
        raise SelectorError(f"an intervention at {escape(selector.site)} is not possible", hint=hint)
    _check_parameters(operation)
    every_call = selector.call is None
    taps, _ = find_matches(replace(selector, call="*") if every_call else selector, catalog)
    floating, refused = check_matches(taps, lambda tap: check_need("op", escape(tap.point.format_name()), tap.info))
    if not floating:
        raise refused[0][1]
    if selector.site in GRADIENTS:
        differentiable, refused = check_matches(floating, lambda tap: check_gradient(tap, objective, catalog))
        if every_call:  # only the calls of a layer that have a gradient, unless none has
            known = {_without_call(tap) for tap in differentiable}
            refused = [each for each in refused if _without_call(each[0]) not in known]
        if refused:
            raise refused[0][1]
        floating = differentiable
    fitting, refused = check_matches(floating, lambda tap: _check_change(tap, operation, catalog, lengths))
    for tap, error in refused:
        others = [each.point for each in fitting if every_call and _without_call(each) == _without_call(tap)]
        if not others:
            raise error
        raise SelectorError(
            error.detail, hint=f"name one call: {escape(others[-1].text.removesuffix(':output'))}"
        ) from None
    return [
        ResolvedIntervention(
            tap.point, tap.info, operation, _find_source(tap, operation, catalog), get_call(tap.point, catalog).is_view
        )
        for tap in floating
    ]


def take_part(
    value: Tensor, source: Capture, change: ResolvedIntervention, token_mask: Tensor | None, own: Tensor | None
) -> TensorData:
    """The part of a captured row that a change inserts into another, whose mask is ``own``; masks are (1, tokens).

    SelectorError if the two parts' shapes differ, as for texts of different lengths.
    """
    row = RowTensor(value, source.info, token_mask)
    if token_mask is not None and row.info.token_axes:
        (row,) = row.strip()
    try:
        part, info = row.index_select(change.operation.indices_by_axis), row.info
    except InputError as error:
        hint = "name indices that both inputs have"
        raise SelectorError(f"of the input in 'from': {error.detail}", hint=hint) from None
    if info.entries_per_row == 1 and info.row_axis is not None:
        part = part.squeeze(info.row_axis)
    changed = change.info if own is None else change.info.with_length(int(own.sum()))
    wanted = compute_part_shape(changed, change.operation)
    if tuple(part.shape) != wanted:
        raise SelectorError(
            f"what is taken of the input in 'from' has shape {list(part.shape)}, and {list(wanted)} is changed",
            hint="name the tokens that are changed, or send texts of one length",
        )
    return TensorData(tuple(part.shape), part.float().contiguous().numpy().astype("<f4").tobytes())


def _find_source(tap: Tap, operation: Operation, catalog: Catalog) -> Capture | None:
    """The capture of another input that an intervention needs; None if it needs none.

    SelectorError if the tensor has no entry for each row, or its part has another shape than the changed one.
    """
    if operation.source is None:
        return None
    taps = [tap] if operation.source.selector is None else find_matches(operation.source.selector, catalog)[0]
    if len(taps) != 1:
        raise SelectorError(f"'from' names {len(taps)} tensors", hint="name one: 'LAYER#0[path]'")
    name, info = escape(taps[0].point.format_name()), taps[0].info
    if GRADIENTS & {taps[0].point.site, tap.point.site}:
        raise SelectorError("'from' takes values, not gradients", hint="name an output, an input or attention")
    check_need("from", name, info)
    try:
        shapes = [compute_part_shape(each.with_length(1), operation) for each in (info, tap.info)]
    except ValueError:
        raise SelectorError(f"{name} has not the axes that are narrowed", hint="leave 'layer' out of 'from'") from None
    if catalog.sizes_known and shapes[0] != shapes[1]:
        there, here = (list(compute_part_shape(each, operation)) for each in (info, tap.info))
        raise SelectorError(
            f"what {name} has there is {there}, and {here} is changed", hint="name a layer whose output has that shape"
        )
    return Capture(taps[0].point, info, Reduction())


def _without_call(tap: Tap) -> tuple[str, str, tuple[str, ...]]:
    """A key that all calls of a module share."""
    return tap.point.layer, tap.point.function, tap.point.path


def _check_parameters(operation: Operation) -> None:
    """SelectorError if an operation has a parameter that it does not take, or none of those that it needs."""
    spec, op = OPERATIONS[operation.op], escape(operation.op)
    given = {name for name in PARAMETERS if vars(operation)[name] is not None}
    given |= {"tensor"} if operation.source is not None else set()
    allowed = {*spec.needs, *spec.optional}
    for name in sorted(given - allowed):
        written = "from" if name == "tensor" and operation.tensor is None else name
        hint = f"it takes {_join_names(sorted(allowed))}" if allowed else "leave it out"
        raise SelectorError(f"op {op} takes no {escape(written)}", hint=hint)
    if spec.needs and not given & set(spec.needs):
        named = (*spec.needs, "from") if "tensor" in spec.needs else spec.needs
        raise SelectorError(f"op {op} needs {_join_names(named)}", hint=f'add "{spec.needs[0]}"')
    if "tensor" in spec.needs and len(given) > 1:
        raise SelectorError(f"op {op} takes {_join_names(sorted(given))}, not both")


def _check_change(tap: Tap, operation: Operation, catalog: Catalog, lengths: TextLengths | None) -> None:
    """SelectorError if an operation does not fit a tensor."""
    name, info, known = escape(format_point(tap.point, catalog)), tap.info, catalog.sizes_known
    largest = torch.finfo(DTYPES[info.dtype]).max
    for parameter in NUMBERS:
        number = vars(operation)[parameter]
        if number is not None and not abs(number) <= largest:  # a kernel would raise, or make it infinite
            raise SelectorError(
                f"{parameter!r} is {number}, which {name} of dtype {info.dtype} does not hold",
                hint=f"use {-largest:g} to {largest:g}",
            )
    if operation.each is not None:
        check_need("each", name, info, "".join(AXES[option] for option in operation.each))
    for option, indices in operation.indices.items():
        check_indices(option, name, info, indices, lengths, sizes_known=known)
        if indices and min(indices) < 0 <= max(indices) and _differ_in_length(info, AXES[option], lengths):
            raise SelectorError(
                f"{option!r} of {name} are counted from both ends, and texts may have any length",
                hint="write two entries, or count all from one end",
            )
    if operation.region is not None:
        check_need("region", name, info)
        top, left, bottom, right = operation.region
        height, width = map(with_common_length(info, lengths).size, "HW")
        if known and not (0 <= top < bottom <= height and 0 <= left < right <= width):
            raise SelectorError(
                f"'region' of {name} must lie within {height} by {width}",
                hint="write [top, left, bottom, right], the last two not included",
            )
    if operation.tensor is not None and known:
        of, shape = f"the tensor for {name}", operation.tensor.shape
        check_shape(of, info, lengths, lambda part: compute_part_shape(part, operation), shape, broadcasts=True)
    if operation.project is not None:
        part = info.index_select(operation.indices_by_axis)
        gives = check_projection(name, part, operation.project, known).size("C")
        if part.size("C") != gives and known:
            detail = f"'project' gives {gives} channels, and {name} has {part.size('C')}"
            raise SelectorError(detail, hint="add a step that leads back")


def _differ_in_length(info: TensorInfo, letter: str, lengths: TextLengths | None) -> bool:
    """Whether rows are known to differ in an axis's size."""
    if lengths is None or not lengths.known:
        return False
    return info.axis(letter) in info.token_axes and lengths.fewest < lengths.most


def _join_names(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
