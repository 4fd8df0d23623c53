"""Pictures made into rows."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.geometry import compute_resized_size
from layertap.models.inputs.library_processor import Preprocessing
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import compute_least_size, make_row, normalize
from layertap.models.spec import Decode, PreprocessSpec
from layertap.service.engine.rows import text_rows
from layertap.service.engine.rows.rows import Rows
from layertap.service.inputs.images import Picture, decode_image, decode_reduced, get_plain_jpeg_size
from layertap.service.inputs.items import ImageItem
from layertap.service.settings import Settings


def get_preprocessing(inputs: ModelInputs) -> Preprocessing:
    """How pictures become a model's rows; InputError where it takes none."""
    if inputs.preprocess is None or not inputs.takes_pictures:
        reason = f": {inputs.no_pictures}" if inputs.no_pictures else ""
        if inputs.text is not None and inputs.text.is_read:
            detail = f"model {inputs.model} takes text, not pictures{reason}"
            raise InputError(detail, hint=text_rows.format_hint(inputs.text))
        detail = f"model {inputs.model} takes tensors, not pictures{reason}"
        raise InputError(detail, hint=f"send {text_rows.describe_inputs(inputs)}")
    return inputs.preprocess


def decode_picture(item: ImageItem, inputs: ModelInputs, settings: Settings) -> Tensor:
    """A picture as a row of pixels (uint8), still to be normalised, or as the model's own; InputError, TooLargeError.

    Pixels are a quarter of the bytes, while rows wait or go to another process.
    """
    row = decode_on_device(item, inputs, settings)
    if row is not None:
        return row
    spec = get_preprocessing(inputs)
    picture = _decode(item.data, settings, spec, inputs.decode)
    return make_row(picture.image, spec, picture.size, picture.box).unsqueeze(0)


def decode_on_device(item: ImageItem, inputs: ModelInputs, settings: Settings) -> Tensor | None:
    """A picture as a row that is on the model's GPU; None where the CPU is to make it, or to refuse the picture.

    TooLargeError.
    """
    if inputs.decoder is None:
        return None
    check = partial(check_resized, get_preprocessing(inputs), settings.max_resized_pixels)
    size = get_plain_jpeg_size(item.data, settings.max_pixels, check)
    row = None if size is None else inputs.decoder.decode_row(item.data, size)
    return None if row is None else row.unsqueeze(0)


def normalize_rows(rows: Rows, inputs: ModelInputs) -> Rows:
    """Rows as the model takes them: those of pixels are normalised, others stay as they are.

    Arrays have their input's dtype by now, and no input of pictures is one of bytes.
    """
    spec = inputs.preprocess
    if not isinstance(spec, PreprocessSpec) or all(value.dtype != torch.uint8 for value in rows.values()):
        return rows
    return {name: normalize(value, spec) for name, value in rows.items()}


def _decode(data: bytes, settings: Settings, spec: Preprocessing, decode: Decode) -> Picture:
    check = partial(check_resized, spec, settings.max_resized_pixels)
    if decode == "fast":
        return decode_reduced(data, settings.max_pixels, partial(compute_least_size, spec), check, spec.background)
    image = decode_image(data, settings.max_pixels, check, spec.background)
    return Picture(image, image.size)


def check_resized(how: Preprocessing, limit: int, width: int, height: int) -> None:
    """TooLargeError for a picture that would be too large once resized, whichever way up it is."""
    spec = how if isinstance(how, PreprocessSpec) else how.nearest
    pixels = prod(compute_resized_size(spec, width, height)) if spec is not None else 0
    if pixels > limit:
        raise TooLargeError(
            f"the picture would be resized to {pixels} pixels, the limit is {limit}",
            hint="send a picture that is less long and narrow",
        )
