"""Decoded pictures, sent as arrays of bytes, made into rows as pictures are."""

from __future__ import annotations

from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from PIL import Image

from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import make_row
from layertap.service.engine.rows.array_rows import name_arrays
from layertap.service.engine.rows.picture_rows import check_resized, get_preprocessing
from layertap.service.engine.rows.rows import Rows
from layertap.service.features import Array
from layertap.service.inputs.items import ArraysItem
from layertap.service.settings import Settings

CHANNELS = 3
PNG_HINT = "send the picture as PNG, whose height and width are told apart"


def is_pixels(item: object, inputs: ModelInputs) -> TypeGuard[ArraysItem]:
    """Whether an item is decoded pictures: bytes, for a model that the server preprocesses pictures for."""
    if not isinstance(item, ArraysItem) or not inputs.takes_pictures:
        return False
    return all(array.dtype == np.uint8 for array in item.arrays.values())


def get_pictures(item: ArraysItem, inputs: ModelInputs) -> Array:
    """The pictures of an item as (pictures, height, width, 3); InputError where its shape is not that of pictures.

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


def fit_pixels(item: ArraysItem, inputs: ModelInputs, settings: Settings) -> Rows:
    """Decoded pictures as rows of pixels, still to be normalised: what the same pictures in PNG become.

    InputError; TooLargeError for more pixels than a picture may have.
    """
    spec, pictures = get_preprocessing(inputs), get_pictures(item, inputs)
    height, width = pictures.shape[1:3]
    if height * width > settings.max_pixels:
        detail = f"the picture has {height * width} pixels ({width} by {height}); the limit is {settings.max_pixels}"
        raise TooLargeError(detail, hint="send a smaller picture")
    check_resized(spec, settings.max_resized_pixels, width, height)
    fit = partial(make_row, how=spec)
    rows = [fit(Image.fromarray(np.ascontiguousarray(picture))) for picture in pictures]
    return {inputs.specs[0].name: torch.stack(rows)}
