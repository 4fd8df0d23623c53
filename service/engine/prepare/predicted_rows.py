"""Predicts rows before items are decoded: the tower that takes them, their shape and their number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from layertap.models.devices.devices import DTYPES
from layertap.models.errors import InputError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import Preprocessed, Shapes
from layertap.service.engine.execute.item_arrays import (
    choose_tower,
    fits,
    get_batch_shape,
    get_pictures,
    is_pixels,
    name_arrays,
)
from layertap.service.inputs.items import ArraysItem, TokensItem


@dataclass(frozen=True)
class PredictedRows:
    """What is known of a request's rows before anything is decoded.

    ``shapes`` is the shape of one row, the smallest one if inputs differ, because some of them may turn out to be bad;
    ``tower`` the inputs that such a row has. ``uniform``: all rows have this shape. ``count`` and ``nbytes`` are of all
    rows together.
    """

    tower: ModelInputs
    shapes: Shapes
    uniform: bool
    count: int
    nbytes: int


def predict_rows(items: Iterable[object], inputs: ModelInputs) -> PredictedRows:
    """The rows that items become; without items, one row of the configured shape.

    Only arrays have shapes of their own; anything else counts as one row of the configured shape.
    """
    predicted = [_predict_item(item, inputs) for item in items]
    if not predicted:
        predicted = [_make_prediction(inputs.for_shapes(inputs.shapes), inputs.shapes, 1)]
    least = min(predicted, key=lambda each: count_numbers(each.shapes))
    return PredictedRows(
        tower=least.tower,
        shapes=least.shapes,
        uniform=len({each.shapes for each in predicted}) == 1,
        count=sum(each.count for each in predicted),
        nbytes=sum(each.nbytes for each in predicted),
    )


def count_numbers(shapes: Shapes) -> int:
    """How many numbers a row of a shape has, over all inputs of the model."""
    return sum(prod(shape) for shape in shapes)


def find_preprocessed_by(sent: Iterable[object], tower: ModelInputs, shapes: Shapes) -> Preprocessed:
    """Who preprocessed rows of this shape, by the sent items; a model of tensors leaves no choice."""
    if tower.takes_plain or not tower.preprocesses:
        return "caller" if is_reshaped(tower, shapes) else ""
    kinds = {isinstance(item, (ArraysItem, TokensItem)) and not is_pixels(item, tower) for item in sent}
    return "mixed" if len(kinds) > 1 else "caller" if True in kinds else ""


def is_reshaped(tower: ModelInputs, shapes: Shapes) -> bool:
    """Whether rows have another shape than the configured one; the length of a text does not count."""
    return any(shape != spec.shape for spec, shape in zip(tower.specs, shapes, strict=True) if spec.longest is None)


def _predict_item(item: object, inputs: ModelInputs) -> PredictedRows:
    tower = choose_tower(item, inputs)
    configured = _make_prediction(tower, tower.shapes, 1)
    if not isinstance(item, ArraysItem):
        return configured
    try:
        if is_pixels(item, tower):
            return _make_prediction(tower, tower.shapes, len(get_pictures(item, tower)))
        by_name = name_arrays(item, tower)
    except InputError:
        return configured
    named = {spec.name: spec for spec in tower.specs if spec.name in by_name}
    shapes = {name: get_batch_shape(by_name[name], spec, item.may_batch) for name, spec in named.items()}
    if not all(fits(shapes[name][1:], spec) for name, spec in named.items()):
        return configured
    rows, text = next(iter(shapes.values()))[0], tower.text
    if text is not None and text.mask is not None and text.mask not in shapes:  # each text is as long as its tensor
        shapes[text.mask] = rows, shapes[text.ids][1 + text.axis]
    return _make_prediction(tower, tuple(shapes[spec.name][1:] for spec in tower.specs), rows)


def _make_prediction(tower: ModelInputs, shapes: Shapes, rows: int) -> PredictedRows:
    sizes = zip(tower.specs, shapes, strict=True)
    row_bytes = sum(prod(shape) * DTYPES[spec.dtype].itemsize for spec, shape in sizes)
    return PredictedRows(tower, shapes, True, rows, rows * row_bytes)
