"""Tensors that an intervention takes from another input: where they are captured, and which part is inserted."""

from __future__ import annotations

from torch import Tensor

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import InputError, SelectorError, escape
from layertap.models.plan.matches import SelectorMatch, find_matches
from layertap.models.plan.operations import compute_part_shape
from layertap.models.plan.plan import Capture, ResolvedIntervention, get_boundary
from layertap.models.plan.requested import Operation, Reduction, TensorData
from layertap.models.points import GRADIENTS, Point


def find_source(match: SelectorMatch, operation: Operation, catalog: Catalog) -> Capture | None:
    """The capture of another input that an intervention needs; None if it needs none.

    SelectorError if the tensor has no entry for each row, or its part has another shape than the changed one.
    """
    if operation.source is None:
        return None
    taken = _find_match(match, operation, catalog)
    name, info = escape(taken.point.format_name()), taken.info
    if taken.point.site in GRADIENTS or match.point.site in GRADIENTS:
        raise SelectorError("'from' takes values, not gradients", hint="name an output, an input or attention")
    if not info.is_floating or info.row_axis is None or info.crosses_rows:
        raise SelectorError(f"{name} is no floating tensor of which each input has its own part", hint="name another")
    try:
        shapes = [compute_part_shape(each.with_length(1), operation) for each in (info, match.info)]
    except ValueError:
        raise SelectorError(f"{name} has not the axes that are narrowed", hint="leave 'layer' out of 'from'") from None
    if catalog.sizes_known and shapes[0] != shapes[1]:
        there, here = (list(compute_part_shape(each, operation)) for each in (info, match.info))
        raise SelectorError(
            f"what {name} has there is {there}, and {here} is changed", hint="name a layer whose output has that shape"
        )
    return Capture(taken.point, info, Reduction())


def find_tensor(point: Point, catalog: Catalog) -> TensorInfo | None:
    """The tensor at a point in another catalog of the same model; None if there is none."""
    try:
        tensors = get_boundary(point, catalog).tensors
    except LookupError:
        return None
    return next((info for info in tensors if info.path == point.path), None)


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


def _find_match(match: SelectorMatch, operation: Operation, catalog: Catalog) -> SelectorMatch:
    source = operation.source
    if source is None or source.selector is None:
        return match
    matches, _ = find_matches(source.selector, catalog)
    if len(matches) != 1:
        raise SelectorError(f"'from' names {len(matches)} tensors", hint="name one: 'LAYER#0[path]'")
    return matches[0]
