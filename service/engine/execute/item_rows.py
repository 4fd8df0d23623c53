"""The rows that items become: which input of the model each array is, and how many rows of which shape there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import numpy as np

from layertap.models.devices.devices import DTYPES
from layertap.models.errors import InputError, TooLargeError, escape, find_nearest, suggest
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import InputSpec, Preprocessed, Shapes
from layertap.service.features import Array
from layertap.service.inputs.items import ArraysItem, TextItem, TokensItem

CHANNELS = 3
PNG_HINT = "send the picture as PNG, which says its height and width"


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

    The shape of an array is known; any other item counts as one row of the configured shape.
    """
    predicted = [_predict_item(item, inputs) for item in items]
    if not predicted:
        predicted = [(inputs.for_shapes(inputs.shapes), inputs.shapes, 1)]
    tower, shapes, _ = min(predicted, key=lambda each: count_numbers(each[1]))
    return PredictedRows(
        tower=tower,
        shapes=shapes,
        uniform=len({each for _, each, _ in predicted}) == 1,
        count=sum(count for _, _, count in predicted),
        nbytes=sum(count * _count_bytes(tower, shapes) for tower, shapes, count in predicted),
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


def choose_tower(item: object, inputs: ModelInputs) -> ModelInputs:
    """The inputs of one of two towers if an item has nothing for the other; else all inputs."""
    if not inputs.towers:
        return inputs
    texts, pictures, whole = inputs.towers
    if isinstance(item, (TextItem, TokensItem)):
        return texts
    if not isinstance(item, ArraysItem):
        return pictures
    names = set(item.arrays)
    return next((each for each in (texts, pictures) if names <= {spec.name for spec in each.specs}), whole)


def is_pixels(item: object, inputs: ModelInputs) -> TypeGuard[ArraysItem]:
    """Whether an item is decoded pictures or videos: bytes, for a model whose pictures the server preprocesses."""
    if not isinstance(item, ArraysItem) or not (inputs.takes_pictures or inputs.video):
        return False
    return all(array.dtype == np.uint8 for array in item.arrays.values())


def get_pictures(item: ArraysItem, inputs: ModelInputs) -> Array:
    """The pictures of an item as (pictures, height, width, 3); InputError if its shape is not that of pictures.

    The channels are the last axis, or the first of a picture. Videos: (videos, frames, height, width, 3).
    """
    (array,) = _name_arrays(item, inputs).values()
    axes = 3 if inputs.video is None else 4
    batch = array if item.may_batch and array.ndim == axes + 1 else array[None]
    shape = list(array.shape)
    if inputs.video is not None:
        if batch.ndim != axes + 1 or batch.shape[-1] != CHANNELS or 0 in batch.shape:
            hint = f"send [frames, height, width, {CHANNELS}], or floats as the model takes them"
            raise InputError(f"bytes of shape {shape} are no video", hint=hint)
        return batch
    if batch.ndim != 4 or CHANNELS not in (batch.shape[1], batch.shape[3]):
        raise InputError(
            f"bytes of shape {shape} are no picture",
            hint=f"send [height, width, {CHANNELS}] or [{CHANNELS}, height, width], or floats as the model takes them",
        )
    if batch.shape[1] == batch.shape[3]:
        raise InputError(f"shape {shape} has {CHANNELS} channels first or last, either may be meant", hint=PNG_HINT)
    if 0 in batch.shape:
        raise InputError(f"shape {shape} holds no pixels")
    return batch if batch.shape[3] == CHANNELS else batch.transpose(0, 2, 3, 1)


def _name_arrays(item: ArraysItem, inputs: ModelInputs) -> dict[str, Array]:
    """Arrays by the names of the model's inputs; InputError if they have other names."""
    specs, text = inputs.specs, inputs.text
    arrays = item.arrays
    if text is not None and text.mask is not None:
        may_lack = {text.mask, text.types} - {None}
        further = {str(name): array for name, array in arrays.items() if name in may_lack}
        others = {name: array for name, array in arrays.items() if name not in may_lack}
        if len(others) == 1 and (not text.takes_text or set(others) <= {None, text.ids}):
            return {text.ids: next(iter(others.values())), **further}
    if inputs.sound is not None and inputs.mask is not None and set(arrays) <= {None, specs[0].name}:
        return {specs[0].name: next(iter(arrays.values()))}  # the mask is one of ones
    if len(specs) == 1 and len(arrays) == 1 and not item.by_name:
        return {specs[0].name: next(iter(arrays.values()))}
    wanted = sorted(spec.name for spec in specs)
    hint = "name the arrays " + ", ".join(wanted)
    if None in arrays:
        raise InputError(f"the model takes {len(wanted)} inputs by name, {len(arrays)} arrays were sent", hint=hint)
    if (unknown := next((name for name in arrays if name not in wanted), None)) is not None:
        hint = suggest(find_nearest(unknown, wanted)) or hint
        raise InputError(f"the model has no input {escape(unknown)}", hint=hint)
    if (missing := next((name for name in wanted if name not in arrays), None)) is not None:
        raise InputError(f"there is no array for the model's input {escape(missing)}", hint=hint)
    return {str(name): array for name, array in arrays.items()}


def shape_arrays(item: ArraysItem, inputs: ModelInputs) -> dict[str, Array]:
    """An item's arrays by the names of the model's inputs, in their order, with the rows on axis 0; views.

    A text's mask and token types may be missing. InputError if they have other names, or a row of one of them may not
    be sent.
    """
    by_name, batches = _name_arrays(item, inputs), dict[str, Array]()
    for spec in inputs.specs:
        if spec.name not in by_name:
            continue
        array = by_name[spec.name]
        batch = array if item.may_batch and array.ndim == len(spec.shape) + 1 else array[None]
        fewest = int(inputs.text is not None)
        is_any = inputs.of_layer and batch.ndim == len(spec.shape) + 1
        if not is_any and not _fits(batch.shape[1:], spec, fewest):
            longest = f", axis {spec.long_axis} from {fewest} to {spec.longest}" if spec.longest else ""
            raise InputError(
                f"a tensor of shape {list(array.shape)} does not fit input '{spec.name}'",
                hint=f"send shape {list(spec.shape)}, dtype {spec.dtype}{longest}",
            )
        batches[spec.name] = batch
    return batches


def complete_shapes(given: Mapping[str | None, tuple[int, ...]], inputs: ModelInputs) -> Shapes:
    """The shapes of a row, by those ``given`` of its arrays; configured if there are none. InputError as for arrays."""
    if not given:
        return inputs.shapes
    try:
        arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in given.items()}  # take no memory
    except ValueError:
        raise InputError("no input has so many numbers") from None
    item = ArraysItem(arrays, by_name=None not in arrays)
    shape_arrays(item, inputs)
    return _predict_item(item, inputs)[1]


def check_pixels(shape: Sequence[int], spec: InputSpec, limit: int) -> None:
    """TooLargeError if a row has more pixels than its input is configured for, and than the limit."""
    pixels = prod(shape[1:])
    if pixels > max(limit, prod(spec.shape[1:])):
        detail = f"input '{spec.name}' has {pixels} pixels, the limit is {limit}"
        raise TooLargeError(detail, hint=f"send shape {list(spec.shape)}")


def _predict_item(item: object, inputs: ModelInputs) -> tuple[ModelInputs, Shapes, int]:
    """The tower of an item, the shape of its rows and their number."""
    tower = choose_tower(item, inputs)
    configured = tower, tower.shapes, 1
    if not isinstance(item, ArraysItem):
        return configured
    try:
        if is_pixels(item, tower):
            return tower, tower.shapes, len(get_pictures(item, tower))
        shapes = {name: batch.shape for name, batch in shape_arrays(item, tower).items()}
    except InputError:
        return configured
    count, text = next(iter(shapes.values()))[0], tower.text
    if tower.sound is not None and (mask := tower.mask) is not None and mask not in shapes:
        shapes[mask] = count, get_mask_length(next(iter(shapes.values()))[1], tower)
    if text is not None:  # each text is as long as its tensor
        tokens = count, shapes[text.ids][1 + text.axis]
        shapes = dict.fromkeys(filter(None, (text.mask, text.types)), tokens) | shapes
    return tower, tuple(shapes[spec.name][1:] for spec in tower.specs), count


def get_mask_length(frames: int, tower: ModelInputs) -> int:
    """The entries of the mask of a sound that is sent as so many frames, without one."""
    return tower.frames or frames


def _count_bytes(tower: ModelInputs, shapes: Shapes) -> int:
    return sum(prod(shape) * DTYPES[spec.dtype].itemsize for spec, shape in zip(tower.specs, shapes, strict=True))


def _fits(shape: tuple[int, ...], spec: InputSpec, fewest: int) -> bool:
    """Whether a row of that shape may be sent; ``fewest``: entries along an axis that may have other lengths."""
    if len(shape) != len(spec.shape):
        return False
    if spec.longest is not None:
        length = shape[spec.long_axis]
        return fewest <= length <= spec.longest and shape == spec.with_length(length).shape
    if 0 in shape:
        return shape == spec.shape
    # Height and width may differ if the model takes that; the survey of the new shape shows it.
    return shape == spec.shape if len(shape) < 3 else shape[0] == spec.shape[0]
