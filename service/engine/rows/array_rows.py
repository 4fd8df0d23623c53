"""Arrays made into rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import InputError, TooLargeError, escape, find_nearest, suggest
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.text import TextSpec
from layertap.models.spec import InputSpec
from layertap.service.engine.rows.rows import Rows
from layertap.service.features import Array
from layertap.service.inputs.items import ArraysItem, TextItem, TokensItem
from layertap.service.settings import Settings


def choose_tower(item: object, inputs: ModelInputs) -> ModelInputs:
    """The inputs of what an item becomes: of two towers those of one, where it has nothing for the other."""
    if not inputs.towers:
        return inputs
    texts, pictures, whole = inputs.towers
    if isinstance(item, (TextItem, TokensItem)):
        return texts
    if not isinstance(item, ArraysItem):
        return pictures
    names = set(item.arrays)
    return next((each for each in (texts, pictures) if names <= {spec.name for spec in each.specs}), whole)


def convert_arrays(item: ArraysItem, inputs: ModelInputs, settings: Settings) -> Rows:
    """Arrays as rows; InputError where the model does not take them, TooLargeError."""
    by_name = name_arrays(item, inputs)
    rows = {
        spec.name: _to_tensor(by_name[spec.name], spec, item.may_batch) for spec in inputs.specs if spec.name in by_name
    }
    if inputs.text is not None and inputs.text.mask is not None and inputs.text.mask not in rows:
        rows[inputs.text.mask] = _make_mask(rows[inputs.text.ids], inputs.text)
    _check_pixels(rows, inputs, settings)
    counts = {len(value) for value in rows.values()}
    spec_values = zip(inputs.specs, rows.values(), strict=True)
    if len({value.shape[1 + spec.long_axis] for spec, value in spec_values if spec.longest}) > 1:
        raise InputError("the model's inputs have different lengths", hint="send as many mask entries as tokens")
    if len(counts) != 1:
        raise InputError(f"the model's inputs have different numbers of rows: {sorted(counts)}")
    if counts == {0}:
        raise InputError("the batch holds no rows")
    if inputs.text is not None and inputs.text.is_read and inputs.text.has_left_padding(rows):
        _pad_in_front(rows, inputs.text)
    return rows if inputs.text is None or inputs.text.pads else _cut_padding(rows, inputs.text)


def _cut_padding(rows: dict[str, Tensor], text: TextSpec) -> dict[str, Tensor]:
    """Rows of a model that can't take padding without that behind their texts; InputError where lengths differ."""
    if text.mask is None:
        return rows
    mask = rows[text.mask].bool()
    lengths = mask.shape[1] - mask.flip(1).int().argmax(1)  # of a row without a token all of it
    if bool((lengths != lengths[0]).any()):
        detail = "padding would change this model's texts, and these have several lengths"
        raise InputError(detail, hint="send each as an input of its own")
    return {name: value.narrow(1 + text.axis * (name == text.ids), 0, int(lengths[0])) for name, value in rows.items()}


def _pad_in_front(rows: dict[str, Tensor], text: TextSpec) -> None:
    """Put the id of padding wherever the mask leaves out tokens in front; InputError where the model can't take any."""
    if text.left_padding == "refused":
        raise InputError(
            "the mask begins with 0, and this model would count the tokens in front of the text as its own",
            hint="send the ids without them",
        )
    in_front = rows[text.mask or ""].cumsum(1) == 0
    rows[text.ids] = rows[text.ids].masked_fill(in_front, text.pad)


def _make_mask(ids: Tensor, text: TextSpec) -> Tensor:
    """The mask of texts that come without one: each is as long as its tensor.

    InputError where a layer's output ends like the padding of a shorter text among longer ones.
    """
    tokens = ids.movedim(1 + text.axis, 1)
    if not text.is_read and not bool(tokens[:, -1].flatten(1).any(1).all()):
        raise InputError(
            "the last position is 0 in every channel, as in a text that was captured beside longer ones",
            hint=f"send the positions of its own tokens only, or an npz with '{text.mask}' beside it",
        )
    return torch.ones(tokens.shape[:2], dtype=torch.int64)


def _check_pixels(rows: Rows, inputs: ModelInputs, settings: Settings) -> None:
    """Of another height and width than configured a tensor may be, but not of any."""
    for spec, value in zip(inputs.specs, rows.values(), strict=True):
        pixels = prod(value.shape[2:])
        if pixels > max(settings.max_resized_pixels, prod(spec.shape[1:])):
            raise TooLargeError(
                f"input '{spec.name}' has {pixels} pixels, the limit is {settings.max_resized_pixels}",
                hint=f"send shape {list(spec.shape)}",
            )


def name_arrays(item: ArraysItem, inputs: ModelInputs) -> dict[str, Array]:
    """Arrays by the names of the model's inputs; InputError where they are others."""
    specs, text = inputs.specs, inputs.text
    arrays = item.arrays
    if text is not None and text.mask is not None:
        masks = {str(name): array for name, array in arrays.items() if name == text.mask}
        others = {name: array for name, array in arrays.items() if name != text.mask}
        if len(others) == 1 and (not text.is_read or set(others) <= {None, text.ids}):
            return {text.ids: next(iter(others.values())), **masks}
    if len(specs) == 1 and len(arrays) == 1 and not item.by_name:
        return {specs[0].name: next(iter(arrays.values()))}
    expected_names = {spec.name for spec in specs}
    if set(arrays) != expected_names:
        raise _misnamed_error(arrays, sorted(expected_names))
    return {str(name): array for name, array in arrays.items()}


def _misnamed_error(arrays: Mapping[str | None, Array], wanted: Sequence[str]) -> InputError:
    """What is wrong with the names of arrays, and the right ones."""
    hint = "name the arrays " + ", ".join(wanted)
    if None in arrays:
        return InputError(f"the model takes {len(wanted)} inputs by name, {len(arrays)} arrays were sent", hint=hint)
    unknown = next((name for name in arrays if name not in wanted), None)
    if unknown is None:
        missing = next(name for name in wanted if name not in arrays)
        return InputError(f"there is no array for the model's input {escape(missing)}", hint=hint)
    alike = find_nearest(unknown, wanted)
    return InputError(f"the model has no input {escape(unknown)}", hint=suggest(alike) or hint)


def _to_tensor(array: Array, spec: InputSpec, may_batch: bool) -> Tensor:
    batch = array.reshape(get_batch_shape(array, spec, may_batch))
    if not fits(batch.shape[1:], spec):
        longest = f", axis {spec.long_axis} from 1 to {spec.longest}" if spec.longest else ""
        raise InputError(
            f"a tensor of shape {list(array.shape)} does not fit input '{spec.name}'",
            hint=f"send shape {list(spec.shape)}, dtype {spec.dtype}{longest}",
        )
    return _cast(batch, spec)


def get_batch_shape(array: Array, spec: InputSpec, may_batch: bool) -> tuple[int, ...]:
    """The shape of an array with the rows on axis 0."""
    return array.shape if may_batch and array.ndim == len(spec.shape) + 1 else (1, *array.shape)


def fits(shape: tuple[int, ...], spec: InputSpec) -> bool:
    """Whether an item of that shape may be sent."""
    if len(shape) != len(spec.shape) or 0 in shape:
        return False
    if spec.longest is not None:
        axis = spec.long_axis
        return shape[axis] <= spec.longest and shape == (*spec.shape[:axis], shape[axis], *spec.shape[axis + 1 :])
    # Height and width may differ where the model takes that; the survey of the new shape tells.
    return shape == spec.shape if len(shape) < 3 else shape[0] == spec.shape[0]


def _cast(array: Array, spec: InputSpec) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if (array.dtype.kind == "f") != dtype.is_floating_point:
        hint = "send a picture as a picture, or preprocess it yourself" if dtype.is_floating_point else ""
        raise InputError(f"input '{spec.name}' takes {spec.dtype}, not {array.dtype.name}", hint=hint)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array is read-only; the cast below or the model's copy owns
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(dtype)
