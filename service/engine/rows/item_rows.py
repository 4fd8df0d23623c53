"""An item made into rows: decode, preprocess, check against what the model takes. Runs in the decode pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.text import TextSpec
from layertap.service.engine.rows import array_rows, picture_rows, text_rows
from layertap.service.engine.rows.pixel_rows import fit_pixels, is_pixels
from layertap.service.engine.rows.rows import Attempt, Items, Rows
from layertap.service.inputs.arrays import require_finite
from layertap.service.inputs.items import ArraysItem, ImageItem, LocalItem, TextItem, TokensItem
from layertap.service.settings import Settings


def decode_item(item: LocalItem, inputs: ModelInputs, settings: Settings) -> list[Attempt]:
    """One item as rows; InputError, TooLargeError.

    A batch comes in one piece. Where some of its rows are not finite it comes row by row, an error in place of each;
    one of more rows than allowed is not looked into.
    """
    inputs = array_rows.choose_tower(item, inputs)
    if isinstance(item, ImageItem):
        return [{inputs.specs[0].name: picture_rows.decode_picture(item, inputs, settings)}]
    if is_pixels(item, inputs):
        return [fit_pixels(item, inputs, settings)]
    if isinstance(item, ArraysItem):
        rows = array_rows.convert_arrays(item, inputs, settings)
    else:
        rows = text_rows.tokenize_item(item, inputs)
    if len(next(iter(rows.values()))) > settings.max_inputs or _find_error(rows, inputs) is None:
        return [rows]
    return [_find_error(row, inputs) or row for row in _split_rows(rows)]


def try_to_decode(item: LocalItem, inputs: ModelInputs, settings: Settings) -> Sequence[Attempt]:
    """One item as rows, or why there are none; raises nothing that its sender should not see."""
    try:
        return decode_item(item, inputs, settings)
    except (InputError, TooLargeError) as error:
        return [error]
    except MemoryError:
        return [TooLargeError("there is no memory to decode this input", hint="send a smaller one")]


def pad_texts(items: Items, attempts: Sequence[Sequence[Attempt]], text: TextSpec) -> list[Sequence[Attempt]]:
    """What was made of items, texts and tokens among them padded to one length; arrays of ids stay as they are.

    So do all arrays that a layer made of texts, and all texts of a model that each runs at its own length.
    """
    kinds = (TextItem, TokensItem) if text.is_read else (ArraysItem,)
    places = [place for place, (_, item) in enumerate(items) if isinstance(item, kinds)]
    axis = 1 + text.axis
    lengths = [rows[text.ids].shape[axis] for place in places for rows in attempts[place] if isinstance(rows, Mapping)]
    padded = list(attempts)
    if text.mask is not None and text.pads and lengths:
        size = text.get_padded_length(max(lengths))
        for place in places:
            padded[place] = [
                text_rows.pad_rows(rows, size, text) if isinstance(rows, Mapping) else rows for rows in padded[place]
            ]
    return padded


def _split_rows(rows: Rows) -> Iterator[Rows]:
    for place in range(len(next(iter(rows.values())))):
        yield {name: value[place : place + 1] for name, value in rows.items()}


def _find_error(rows: Rows, inputs: ModelInputs) -> InputError | None:
    """What is wrong with the numbers in rows, looked at as the model gets them: float16 holds less than float64."""
    try:
        for spec, value in zip(inputs.specs, rows.values(), strict=True):
            if value.is_floating_point():
                require_finite(value.to(inputs.dtype).float().numpy())
            elif spec.values is not None:
                _require_within(value, spec.name, min(spec.values[0], 0), spec.values[1] - 1)
        text = inputs.text
        if text is not None and text.mask is not None and not bool(rows[text.mask].any(1).all()):
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
