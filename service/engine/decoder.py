"""Items made into rows: decode, preprocess, check against what the model takes. Runs in the decode pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import InputError, LayertapError, TooLargeError, escape, suggest
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import compute_least_size, compute_resized_size, preprocess
from layertap.models.inputs.text import TextSpec
from layertap.models.spec import Decode, InputSpec, Preprocessed, PreprocessSpec, Shapes
from layertap.service.engine import text_rows
from layertap.service.features import Array
from layertap.service.inputs.arrays import require_finite
from layertap.service.inputs.images import Picture, decode_image, decode_reduced, get_plain_jpeg_size
from layertap.service.inputs.items import ArraysItem, ImageItem, LocalItem, TextItem, TokensItem
from layertap.service.settings import Settings

Rows = Mapping[str, Tensor]
Attempt = Rows | LayertapError
Fetched = LocalItem | LayertapError  # an input, or why it can't be had from where it is
Items = Sequence[tuple[int, Fetched]]


def decode_item(item: LocalItem, inputs: ModelInputs, settings: Settings) -> list[Rows | InputError]:
    """One item as rows, one tensor for each input with the rows on axis 0; InputError or TooLargeError.

    A batch comes in one piece. Where some of its rows are not finite it comes row by row, an error in place of each;
    one of more rows than allowed is not looked into.
    """
    if isinstance(item, ImageItem):
        return [{inputs.specs[0].name: _image(item, inputs, settings)}]
    rows = _arrays(item, inputs, settings) if isinstance(item, ArraysItem) else text_rows.tokenize_item(item, inputs)
    if len(next(iter(rows.values()))) > settings.max_inputs or _fault(rows, inputs) is None:
        return [rows]
    return [_fault(row, inputs) or row for row in _one_by_one(rows)]


def get_preprocessing(inputs: ModelInputs) -> PreprocessSpec:
    """How pictures become a model's rows; InputError where it takes none."""
    if inputs.preprocess is None or len(inputs.specs) != 1:
        if inputs.text is not None and inputs.text.is_read:
            raise InputError(f"model {inputs.model} takes text, not pictures", hint=text_rows.format_hint(inputs.text))
        raise InputError(
            f"model {inputs.model} takes tensors, not pictures", hint=f"send {text_rows.describe_inputs(inputs)}"
        )
    return inputs.preprocess


def find_preprocessed_by(sent: Iterable[object], inputs: ModelInputs, shapes: Shapes) -> Preprocessed:
    """By whom rows of a shape were preprocessed, given what they were sent as; a model of tensors leaves no choice."""
    if not inputs.preprocesses:
        return "caller" if is_reshaped(inputs, shapes) else ""
    kinds = {isinstance(item, (ArraysItem, TokensItem)) for item in sent}
    return "mixed" if len(kinds) > 1 else "caller" if True in kinds else ""


def is_reshaped(inputs: ModelInputs, shapes: Shapes) -> bool:
    """Whether rows have another shape than the configured one; how long a text is does not count."""
    return any(shape != spec.shape for spec, shape in zip(inputs.specs, shapes, strict=True) if spec.longest is None)


def predict_shapes(items: Iterable[object], inputs: ModelInputs) -> tuple[Shapes, int]:
    """The shape of a request's rows and how many there will be, as far as that is known before anything is decoded.

    Arrays tell; whatever else is sent counts as one row of the configured shape. Of several shapes the least: which of
    the inputs are good is not known yet.
    """
    found = [_foretold(item, inputs) for item in items] or [(inputs.shapes, 1)]
    return min((shapes for shapes, _ in found), key=_numbers), sum(rows for _, rows in found)


def _foretold(item: object, inputs: ModelInputs) -> tuple[Shapes, int]:
    configured = inputs.shapes, 1
    if not isinstance(item, ArraysItem):
        return configured
    try:
        by_name = _named(item, inputs.specs, inputs.text)
    except InputError:
        return configured
    given = {spec.name: spec for spec in inputs.specs if spec.name in by_name}
    shapes = {name: _batch_shape(by_name[name], spec, item.may_batch) for name, spec in given.items()}
    if not all(_fits(shapes[name][1:], spec) for name, spec in given.items()):
        return configured
    rows, text = next(iter(shapes.values()))[0], inputs.text
    if text is not None and text.mask is not None and text.mask not in shapes:  # each text is as long as its tensor
        shapes[text.mask] = rows, shapes[text.ids][1 + text.axis]
    return tuple(shapes[spec.name][1:] for spec in inputs.specs), rows


def _numbers(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)


def pad_texts(items: Items, attempts: Sequence[Sequence[Attempt]], text: TextSpec) -> list[Sequence[Attempt]]:
    """What was made of items, texts and tokens among them filled up to one length; arrays of ids stay as they are.

    So are all arrays that a layer made of texts.
    """
    kinds = (TextItem, TokensItem) if text.is_read else (ArraysItem,)
    places = [place for place, (_, item) in enumerate(items) if isinstance(item, kinds)]
    axis = 1 + text.axis
    lengths = [rows[text.ids].shape[axis] for place in places for rows in attempts[place] if isinstance(rows, Mapping)]
    found = list(attempts)
    if text.mask is not None and lengths:
        size = text.get_padded_length(max(lengths))
        for place in places:
            found[place] = [
                text_rows.pad_rows(each, size, text) if isinstance(each, Mapping) else each for each in found[place]
            ]
    return found


def join_rows(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """All rows of a request; their shapes agree."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: transfer.join_rows([part[name] for part in parts]) for name in parts[0]}


def count_rows(attempts: Sequence[Rows | InputError]) -> int:
    """How many rows were made of an item."""
    return sum(len(next(iter(each.values()))) for each in attempts if not isinstance(each, InputError))


def get_row_shapes(rows: Rows) -> tuple[tuple[int, ...], ...]:
    """The shape of one row, input by input."""
    return tuple(tuple(value.shape[1:]) for value in rows.values())


def _image(item: ImageItem, inputs: ModelInputs, settings: Settings) -> Tensor:
    how = get_preprocessing(inputs)
    row = _on_device(item.data, inputs.decoder, how, settings) if inputs.decoder else None
    if row is None:
        picture = _decoded(item.data, settings, how, inputs.decode)
        row = preprocess(picture.image, how, picture.size, picture.box)
    return row.unsqueeze(0)


def _on_device(data: bytes, decoder: DeviceDecoder, how: PreprocessSpec, settings: Settings) -> Tensor | None:
    """A picture's row made on the model's GPU; None where it is to be made here, or refused here."""
    size = get_plain_jpeg_size(data, settings.max_pixels, partial(_check_resized, how, settings.max_resized_pixels))
    return None if size is None else decoder.decode_row(data, size)


def _decoded(data: bytes, settings: Settings, how: PreprocessSpec, decode: Decode) -> Picture:
    fits = partial(_check_resized, how, settings.max_resized_pixels)
    if decode == "fast":
        return decode_reduced(data, settings.max_pixels, partial(compute_least_size, how), fits)
    image = decode_image(data, settings.max_pixels, fits)
    return Picture(image, image.size)


def _check_resized(how: PreprocessSpec, limit: int, width: int, height: int) -> None:
    """TooLargeError for a picture that would be too large once resized, whichever way up it is."""
    pixels = prod(compute_resized_size(how, width, height))
    if pixels > limit:
        raise TooLargeError(
            f"the picture would be resized to {pixels} pixels, the limit is {limit}",
            hint="send a picture that is less long and narrow",
        )


def _arrays(item: ArraysItem, inputs: ModelInputs, settings: Settings) -> Rows:
    by_name = _named(item, inputs.specs, inputs.text)
    rows = {
        spec.name: _tensor(by_name[spec.name], spec, item.may_batch) for spec in inputs.specs if spec.name in by_name
    }
    if inputs.text is not None and inputs.text.mask is not None and inputs.text.mask not in rows:
        rows[inputs.text.mask] = _mask(rows[inputs.text.ids], inputs.text)
    _check_pixels(rows, inputs, settings)
    counts = {len(value) for value in rows.values()}
    given = zip(inputs.specs, rows.values(), strict=True)
    if len({value.shape[1 + spec.long_axis] for spec, value in given if spec.longest}) > 1:
        raise InputError("the model's inputs have different lengths", hint="send as many mask entries as tokens")
    if len(counts) != 1:
        raise InputError(f"the model's inputs have different numbers of rows: {sorted(counts)}")
    if counts == {0}:
        raise InputError("the batch holds no rows")
    return rows


def _mask(ids: Tensor, text: TextSpec) -> Tensor:
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


def _one_by_one(rows: Rows) -> Iterator[Rows]:
    for at in range(len(next(iter(rows.values())))):
        yield {name: value[at : at + 1] for name, value in rows.items()}


def _check_pixels(rows: Rows, inputs: ModelInputs, settings: Settings) -> None:
    """Of another height and width than configured a tensor may be, but not of any."""
    for spec, value in zip(inputs.specs, rows.values(), strict=True):
        pixels = prod(value.shape[2:])
        if pixels > max(settings.max_resized_pixels, prod(spec.shape[1:])):
            raise TooLargeError(
                f"input '{spec.name}' has {pixels} pixels, the limit is {settings.max_resized_pixels}",
                hint=f"send shape {list(spec.shape)}",
            )


def _fault(rows: Rows, inputs: ModelInputs) -> InputError | None:
    # Looked at as the model gets them: what is finite in float64 may not be in float16.
    try:
        for spec, value in zip(inputs.specs, rows.values(), strict=True):
            if value.is_floating_point():
                require_finite(value.to(inputs.dtype).float().numpy())
            elif spec.values is not None:
                _require_within(value, spec.name, min(spec.values[0], 0), spec.values[1] - 1)
        if inputs.text is not None and inputs.text.mask is not None and not bool(rows[inputs.text.mask].any(1).all()):
            raise InputError("the mask leaves no token", hint="send 1 for each token that counts")
    except InputError as error:
        return error
    return None


def _require_within(value: Tensor, name: str, least: int, most: int) -> None:
    outside = value[(value < least) | (value > most)]
    if outside.numel():
        raise InputError(
            f"input '{name}' holds {int(outside[0])}, which is not among its values",
            hint=f"send whole numbers from {least} to {most}",
        )


def _named(item: ArraysItem, specs: Sequence[InputSpec], text: TextSpec | None) -> dict[str, Array]:
    arrays = item.arrays
    if text is not None and text.mask is not None:
        masks = {str(name): array for name, array in arrays.items() if name == text.mask}
        others = {name: array for name, array in arrays.items() if name != text.mask}
        if len(others) == 1 and (not text.is_read or set(others) <= {None, text.ids}):
            return {text.ids: next(iter(others.values())), **masks}
    if len(specs) == 1 and len(arrays) == 1 and not item.by_name:
        return {specs[0].name: next(iter(arrays.values()))}
    wanted = {spec.name for spec in specs}
    if set(arrays) != wanted:
        raise _misnamed(arrays, sorted(wanted))
    return {str(name): array for name, array in arrays.items()}


def _misnamed(arrays: Mapping[str | None, Array], wanted: Sequence[str]) -> InputError:
    """What is wrong with the names of arrays, and the right ones."""
    hint = "name the arrays " + ", ".join(wanted)
    if None in arrays:
        return InputError(f"the model takes {len(wanted)} inputs by name, {len(arrays)} arrays were sent", hint=hint)
    unknown = next((name for name in arrays if name not in wanted), None)
    if unknown is None:
        missing = next(name for name in wanted if name not in arrays)
        return InputError(f"there is no array for the model's input {escape(missing)}", hint=hint)
    alike = tuple(get_close_matches(unknown[:100], wanted, n=1))
    return InputError(f"the model has no input {escape(unknown)}", hint=suggest(alike) or hint)


def _tensor(array: Array, spec: InputSpec, may_batch: bool) -> Tensor:
    batch = array.reshape(_batch_shape(array, spec, may_batch))
    if not _fits(batch.shape[1:], spec):
        longest = f", axis {spec.long_axis} from 1 to {spec.longest}" if spec.longest else ""
        raise InputError(
            f"a tensor of shape {list(array.shape)} does not fit input '{spec.name}'",
            hint=f"send shape {list(spec.shape)}, dtype {spec.dtype}{longest}",
        )
    return _cast(batch, spec)


def _batch_shape(array: Array, spec: InputSpec, may_batch: bool) -> tuple[int, ...]:
    """The shape of an array with the rows on axis 0."""
    return array.shape if may_batch and array.ndim == len(spec.shape) + 1 else (1, *array.shape)


def _fits(shape: tuple[int, ...], spec: InputSpec) -> bool:
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
