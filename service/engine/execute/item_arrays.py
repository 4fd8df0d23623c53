"""Items of a request as arrays of a model's inputs: which input each is, and whether its shape fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import numpy as np

from layertap.models.errors import InputError, escape, find_nearest, suggest
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import InputSpec
from layertap.service.features import Array
from layertap.service.inputs.items import ArraysItem, TextItem, TokensItem

CHANNELS = 3
PNG_HINT = "send the picture as PNG, whose height and width are told apart"


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
    """Whether an item is decoded pictures: bytes, for a model whose pictures the server preprocesses."""
    if not isinstance(item, ArraysItem) or not inputs.takes_pictures:
        return False
    return all(array.dtype == np.uint8 for array in item.arrays.values())


def get_pictures(item: ArraysItem, inputs: ModelInputs) -> Array:
    """The pictures of an item as (pictures, height, width, 3); InputError if its shape is not that of pictures.

    The channels are the last axis, or the first of a picture.
    """
    (array,) = name_arrays(item, inputs).values()
    batch = array if item.may_batch and array.ndim == 4 else array[None]
    shape = list(array.shape)
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


def name_arrays(item: ArraysItem, inputs: ModelInputs) -> dict[str, Array]:
    """Arrays by the names of the model's inputs; InputError if they have other names."""
    specs, text = inputs.specs, inputs.text
    arrays = item.arrays
    if text is not None and text.mask is not None:
        masks = {str(name): array for name, array in arrays.items() if name == text.mask}
        others = {name: array for name, array in arrays.items() if name != text.mask}
        if len(others) == 1 and (not text.takes_text or set(others) <= {None, text.ids}):
            return {text.ids: next(iter(others.values())), **masks}
    if len(specs) == 1 and len(arrays) == 1 and not item.by_name:
        return {specs[0].name: next(iter(arrays.values()))}
    expected_names = {spec.name for spec in specs}
    if set(arrays) != expected_names:
        raise _misnamed_error(arrays, sorted(expected_names))
    return {str(name): array for name, array in arrays.items()}


def get_batch_shape(array: Array, spec: InputSpec, may_batch: bool) -> tuple[int, ...]:
    """The shape of an array with the rows on axis 0."""
    return array.shape if may_batch and array.ndim == len(spec.shape) + 1 else (1, *array.shape)


def fits(shape: tuple[int, ...], spec: InputSpec) -> bool:
    """Whether a row of that shape may be sent."""
    if len(shape) != len(spec.shape) or 0 in shape:
        return False
    if spec.longest is not None:
        axis = spec.long_axis
        return shape[axis] <= spec.longest and shape == (*spec.shape[:axis], shape[axis], *spec.shape[axis + 1 :])
    # Height and width may differ if the model takes that; the survey of the new shape shows it.
    return shape == spec.shape if len(shape) < 3 else shape[0] == spec.shape[0]


def _misnamed_error(arrays: Mapping[str | None, Array], wanted: Sequence[str]) -> InputError:
    """What is wrong with the names of arrays, and the right ones."""
    hint = "name the arrays " + ", ".join(wanted)
    if None in arrays:
        return InputError(f"the model takes {len(wanted)} inputs by name, {len(arrays)} arrays were sent", hint=hint)
    unknown = next((name for name in arrays if name not in wanted), None)
    if unknown is None:
        missing = next(name for name in wanted if name not in arrays)
        return InputError(f"there is no array for the model's input {escape(missing)}", hint=hint)
    return InputError(f"the model has no input {escape(unknown)}", hint=suggest(find_nearest(unknown, wanted)) or hint)
