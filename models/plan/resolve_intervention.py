"""Look up a request's interventions in a catalog, and refuse impossible ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import SelectorError, escape
from layertap.models.plan.matches import SelectorMatch, check_matches, find_matches
from layertap.models.plan.operations import OPERATIONS, compute_part_shape
from layertap.models.plan.plan import ResolvedIntervention, ResolvedObjective, get_call
from layertap.models.plan.projections import NO_PROJECTIONS, Projections, check_projection, find_projection
from layertap.models.plan.requested import Intervention, Operation
from layertap.models.plan.resolve_objective import check_gradient
from layertap.models.plan.tensor_sources import find_source
from layertap.models.plan.text_lengths import TextLengths, check_indices, check_shape, get_size, with_common_length
from layertap.models.points import AXES, EACH, EDITABLE, GIVE_LAYOUT, GRADIENTS

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
        raise SelectorError(
            f"an intervention at {escape(selector.site)} is not possible", hint=f"use {_join_names(sorted(EDITABLE))}"
        )
    _check_parameters(operation)
    every_call = selector.call is None
    matches, _ = find_matches(replace(selector, call="*") if every_call else selector, catalog)
    floating = [match for match in matches if match.info.is_floating]
    if every_call and selector.site in GRADIENTS:
        differentiable, _ = check_matches(floating, lambda each: check_gradient(each, objective, catalog))
        # Keep a layer's calls that have a gradient; if none has, keep all: the check below reports why.
        known = {_get_call(match) for match in differentiable}
        floating = [match for match in floating if match in differentiable or _get_call(match) not in known]
    if not floating:
        point, dtype = matches[0].point, matches[0].info.dtype
        name = escape(point.format_name())
        raise SelectorError(f"{name} is of dtype {dtype}; only floating values are changed")
    fitting, refused = check_matches(floating, lambda each: _check_change(each, operation, catalog, lengths))
    for match, error in refused:
        raise _offer_call(error, [each for each in fitting if every_call and _get_call(each) == _get_call(match)])
    for match in floating if selector.site in GRADIENTS else ():
        check_gradient(match, objective, catalog)
    return [
        ResolvedIntervention(
            match.point,
            match.info,
            operation,
            find_source(match, operation, catalog),
            get_call(match.point, catalog).is_view,
        )
        for match in floating
    ]


def _get_call(match: SelectorMatch) -> tuple[str, str, tuple[str, ...]]:
    """A key that all calls of a module share."""
    return match.point.layer, match.point.function, match.point.path


def _check_change(match: SelectorMatch, operation: Operation, catalog: Catalog, lengths: TextLengths | None) -> None:
    """SelectorError if an operation does not fit a tensor."""
    several = len(catalog.layers[match.point.layer].calls) > 1
    call = f"#{match.point.call}" if several else ""
    name = escape(match.point.format_name(call))
    _check_numbers(name, match.info, operation)
    _check_part(name, match.info, operation, catalog, lengths)


def _offer_call(error: SelectorError, others: Sequence[SelectorMatch]) -> SelectorError:
    """The error with a hint to name a call: the last of ``others``."""
    if not others:
        return error
    point = others[-1].point
    return SelectorError(error.detail, hint=f"name one call: {escape(point.text.removesuffix(':output'))}")


def _check_parameters(operation: Operation) -> None:
    spec, op = OPERATIONS[operation.op], escape(operation.op)
    parameters = {name for name in PARAMETERS if vars(operation)[name] is not None}
    if operation.source is not None:
        parameters.add("tensor")
    for name in sorted(parameters - spec.allowed):
        written = "from" if name == "tensor" and operation.tensor is None else name
        raise SelectorError(
            f"op {op} takes no {escape(written)}",
            hint=f"it takes {_join_names(sorted(spec.allowed))}" if spec.allowed else "leave it out",
        )
    for group in spec.needs:
        if not parameters & set(group):
            named = (*group, "from") if "tensor" in group else group
            raise SelectorError(f"op {op} needs {_join_names(named)}", hint=f'add "{group[0]}"')
    for name, what in (("tensor", "a tensor"), ("project", "a projection")):
        if name in parameters and (others := parameters & {"by", "value", "tensor"} - {name}):
            raise SelectorError(f"op {op} takes {_join_names(sorted(others))} or {what}, not both")
    if operation.std is not None and operation.std < 0:
        raise SelectorError("'std' is 0 or more")


def _check_numbers(name: str, info: TensorInfo, operation: Operation) -> None:
    """SelectorError if a number exceeds the tensor's dtype: a kernel would raise, or make it infinite."""
    largest = torch.finfo(DTYPES[info.dtype]).max
    for parameter in NUMBERS:
        number = vars(operation)[parameter]
        if number is not None and not abs(number) <= largest:
            raise SelectorError(
                f"{parameter!r} is {number}, which {name} of dtype {info.dtype} does not hold",
                hint=f"use {-largest:g} to {largest:g}",
            )


def _check_part(
    name: str, info: TensorInfo, operation: Operation, catalog: Catalog, lengths: TextLengths | None
) -> None:
    for option in operation.each or ():
        if info.row_axis is None or info.crosses_rows or info.entries_per_row > 1:
            raise SelectorError(
                f"{name} has not one entry for each input", hint="leave 'each' out, or name another layer"
            )
        if not info.has_axis(AXES[option]):
            known = [each for each, indices in EACH.items() if info.has_axis(AXES[indices])]
            raise SelectorError(
                f"{name}, layout {info.layout or 'unknown'}, has no {option}",
                hint=f"try {' or '.join(repr(each) for each in known)}" if known else GIVE_LAYOUT,
            )
    for option, indices in operation.indices.items():
        check_indices(name, with_common_length(info, lengths), option, indices, catalog.sizes_known)
        if indices and min(indices) < 0 <= max(indices) and _differ_in_length(info, AXES[option], lengths):
            raise SelectorError(
                f"{option!r} of {name} are counted from both ends, and texts may have any length",
                hint="write two entries, or count all from one end",
            )
    if operation.region is not None:
        top, left, bottom, right = operation.region
        height, width = (get_size(name, with_common_length(info, lengths), "region", letter) for letter in "HW")
        if catalog.sizes_known and not (0 <= top < bottom <= height and 0 <= left < right <= width):
            raise SelectorError(
                f"'region' of {name} must lie within {height} by {width}",
                hint="write [top, left, bottom, right], the last two not included",
            )
    if operation.tensor is not None and catalog.sizes_known:
        check_shape(
            f"the tensor for {name}",
            info,
            lengths,
            lambda part: compute_part_shape(part, operation),
            operation.tensor.shape,
            broadcasts=True,
        )
    if operation.project is not None:
        part = info.index_select(operation.indices_by_axis)
        takes, gives = part.size("C"), check_projection(name, part, operation.project, catalog.sizes_known).size("C")
        if takes != gives and catalog.sizes_known:
            detail = f"'project' gives {gives} channels, and {name} has {takes}"
            raise SelectorError(detail, hint="add a step that leads back")


def _differ_in_length(info: TensorInfo, letter: str, lengths: TextLengths | None) -> bool:
    """Whether rows are known to differ in an axis's size."""
    if lengths is None or not lengths.known:
        return False
    return info.axis(letter) in info.token_axes and lengths.fewest < lengths.most


def _join_names(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
