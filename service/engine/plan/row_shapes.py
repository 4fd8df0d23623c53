"""What rows will be like, as far as that is known before anything is decoded, and by whom they were preprocessed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import InputError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import Preprocessed, Shapes
from layertap.service.engine.rows.array_rows import choose_tower, fits, get_batch_shape, name_arrays
from layertap.service.engine.rows.pixel_rows import get_pictures, is_pixels
from layertap.service.inputs.items import ArraysItem, TokensItem


@dataclass(frozen=True)
class PredictedRows:
    """What is known of a request's rows before anything is decoded.

    ``shapes`` is that of one row, of several shapes the least: which of the inputs are good is not known yet.
    ``uniform``: all have it. ``count`` and ``nbytes`` are of all rows together.
    """

    shapes: Shapes
    uniform: bool
    count: int
    nbytes: int


def find_preprocessed_by(sent: Iterable[object], inputs: ModelInputs, shapes: Shapes) -> Preprocessed:
    """By whom rows of a shape were preprocessed, given what they were sent as; a model of tensors leaves no choice."""
    inputs = inputs.for_shapes(shapes)
    if not inputs.preprocesses:
        return "caller" if is_reshaped(inputs, shapes) else ""
    kinds = {isinstance(item, (ArraysItem, TokensItem)) and not is_pixels(item, inputs) for item in sent}
    return "mixed" if len(kinds) > 1 else "caller" if True in kinds else ""


def is_reshaped(inputs: ModelInputs, shapes: Shapes) -> bool:
    """Whether rows have another shape than the configured one; how long a text is does not count."""
    specs = inputs.for_shapes(shapes).specs
    return any(shape != spec.shape for spec, shape in zip(specs, shapes, strict=True) if spec.longest is None)


def predict_rows(items: Iterable[object], inputs: ModelInputs) -> PredictedRows:
    """The rows that a request's items will be made into; one of the configured shape where there are no items.

    Arrays tell; whatever else is sent counts as one row of the configured shape.
    """
    predicted = [_predict_item(item, inputs) for item in items] or [(inputs.shapes, 1)]
    return PredictedRows(
        shapes=min((shapes for shapes, _ in predicted), key=count_numbers),
        uniform=len({shapes for shapes, _ in predicted}) == 1,
        count=sum(rows for _, rows in predicted),
        nbytes=sum(rows * _count_bytes(shapes, inputs) for shapes, rows in predicted),
    )


def count_numbers(shapes: Shapes) -> int:
    """How many numbers a row of a shape has, in all its inputs."""
    return sum(prod(shape) for shape in shapes)


def _predict_item(item: object, inputs: ModelInputs) -> tuple[Shapes, int]:
    inputs = choose_tower(item, inputs)
    configured = inputs.shapes, 1
    if not isinstance(item, ArraysItem):
        return configured
    try:
        if is_pixels(item, inputs):
            return inputs.shapes, len(get_pictures(item, inputs))
        by_name = name_arrays(item, inputs)
    except InputError:
        return configured
    named = {spec.name: spec for spec in inputs.specs if spec.name in by_name}
    shapes = {name: get_batch_shape(by_name[name], spec, item.may_batch) for name, spec in named.items()}
    if not all(fits(shapes[name][1:], spec) for name, spec in named.items()):
        return configured
    rows, text = next(iter(shapes.values()))[0], inputs.text
    if text is not None and text.mask is not None and text.mask not in shapes:  # each text is as long as its tensor
        shapes[text.mask] = rows, shapes[text.ids][1 + text.axis]
    return tuple(shapes[spec.name][1:] for spec in inputs.specs), rows


def _count_bytes(shapes: Shapes, inputs: ModelInputs) -> int:
    specs = inputs.for_shapes(shapes).specs
    return sum(prod(shape) * DTYPES[spec.dtype].itemsize for spec, shape in zip(specs, shapes, strict=True))
