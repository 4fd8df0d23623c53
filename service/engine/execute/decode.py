"""Converts items to rows, a tensor for each input of the model with the rows on axis 0: decodes, preprocesses, checks.

Runs in the decode pool.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import NoReturn

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.catalog.row_tensor import to_floating
from layertap.models.devices.devices import DTYPES
from layertap.models.devices.memory import is_out_of_memory
from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec, read_mask
from layertap.models.inputs.preprocess import Preprocessing, compute_least_size, make_row, normalize
from layertap.models.inputs.sound import SoundProcessor
from layertap.models.inputs.video import VideoProcessor
from layertap.models.spec import InputSpec, PreprocessSpec
from layertap.service.engine.execute.item_rows import (
    check_pixels,
    choose_tower,
    get_mask_length,
    get_pictures,
    is_pixels,
    shape_arrays,
)
from layertap.service.engine.rows import Attempt, CutRows, Items, Origin, Rows
from layertap.service.errors import UnsupportedMediaError
from layertap.service.features import Array
from layertap.service.inputs.arrays import require_finite
from layertap.service.inputs.images import decode_image, get_plain_jpeg_size
from layertap.service.inputs.items import (
    ArraysItem,
    EncodedItem,
    FramesItem,
    LocalItem,
    SamplesItem,
    TextItem,
    TokensItem,
)
from layertap.service.inputs.sounds import decode_sound, fit_sound, read_samples
from layertap.service.inputs.videos import check_frames, decode_video
from layertap.service.settings import Settings

CHARACTERS = 16  # of a text, for each token that a model takes: bounds the time of the tokenizer
TOKENS_HINT = 'send token ids: {"tokens": [0, 5]}'
CUT_HINT = ', or have it cut: "truncate"'
CUT_CHARACTERS = 2**20  # of a text that may be cut: a tokenizer reads all of it


def try_to_decode(
    item: LocalItem, inputs: ModelInputs, settings: Settings, in_worker: bool = False
) -> Sequence[Attempt]:
    """Decode one item: its rows or its error; raises nothing that the sender should not see."""
    if not in_worker and (error := _find_lack_of_workers(item, inputs)) is not None:
        return [error]
    try:
        return decode_item(item, inputs, settings)
    except (InputError, TooLargeError, UnsupportedMediaError) as error:
        return [error]
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        return [no_memory_error()]


def _find_lack_of_workers(item: LocalItem, inputs: ModelInputs) -> UnsupportedMediaError | None:
    """The refusal of what only worker processes decode: libtiff and FFmpeg know so many kinds."""
    if not isinstance(item, EncodedItem | FramesItem):
        return None
    if any(each.is_tiff for each in (item.frames if isinstance(item, FramesItem) else [item])):
        detail = "TIFF is decoded in worker processes only, of which this model has none"
        return UnsupportedMediaError(detail, hint="save the picture as PNG, or send its pixels as an array")
    if isinstance(item, EncodedItem) and inputs.video is not None:
        detail = "videos are decoded in worker processes only, of which this model has none"
        return UnsupportedMediaError(detail, hint="send the frames as 'images', or as an array")
    return None


def refuse_here(given: object, *_: object) -> NoReturn:
    """Takes the place of a tokenizer or an image processor that exists only in the model's own process."""
    raise NotImplementedError(f"a {type(given).__name__} is to be sent to a worker")


def no_memory_error() -> TooLargeError:
    """The refusal of an item that takes too much memory to decode."""
    return TooLargeError("there is no memory to decode this input", hint="send a smaller one")


def decode_item(item: LocalItem, inputs: ModelInputs, settings: Settings) -> list[Attempt]:
    """Decode one item; InputError, TooLargeError.

    A batch comes in one piece. If some of its rows are not finite it comes row by row, with an error in place of each
    of these. The numbers of a batch with more rows than allowed are not checked.
    """
    inputs = choose_tower(item, inputs)
    if isinstance(item, FramesItem) or (isinstance(item, EncodedItem) and inputs.video is not None):
        return [make_video_row(item, inputs, settings)]
    if isinstance(item, SamplesItem) or (isinstance(item, EncodedItem) and inputs.sound is not None):
        row = make_sound_row(item, inputs, settings)
        return [_find_error(row, inputs) or row]
    if isinstance(item, EncodedItem):
        return [decode_picture(item, inputs, settings)]
    if is_pixels(item, inputs):
        if inputs.video is not None:
            return [make_video_row(video, inputs, settings) for video in get_pictures(item, inputs)]
        return [_fit_pixels(item, inputs, settings)]
    rows = _convert_arrays(item, inputs, settings) if isinstance(item, ArraysItem) else _tokenize(item, inputs)
    count = len(next(iter(rows.values())))
    if count > settings.max_inputs or _find_error(rows, inputs) is None:
        return [rows]
    by_row = ({name: value[row : row + 1] for name, value in rows.items()} for row in range(count))
    return [_find_error(row, inputs) or row for row in by_row]


def _find_error(rows: Rows, inputs: ModelInputs) -> InputError | None:
    """What is wrong with the numbers in rows, in the dtype that the model gets: float16 holds less than float64."""
    try:
        for spec, value in zip(inputs.specs, rows.values(), strict=True):
            if value.is_floating_point():
                require_finite(to_floating(value.to(inputs.dtype)).numpy())
            elif spec.values is not None:
                least, most = min(spec.values[0], 0), spec.values[1] - 1
                if (outside := value[(value < least) | (value > most)]).numel():
                    raise InputError(
                        f"input '{spec.name}' holds {int(outside[0])}, which is not among its values",
                        hint=f"send whole numbers from {least} to {most}",
                    )
        name = inputs.mask
        if name is not None and name in rows and not bool(read_mask(name, rows[name]).any(1).all()):
            raise InputError("the mask leaves no token", hint="send a mask that keeps each token that counts")
    except InputError as error:
        return error
    return None


def get_preprocessing(inputs: ModelInputs) -> Preprocessing:
    """How pictures become a model's rows; InputError if it takes none."""
    if not isinstance(inputs.preprocess, SoundProcessor | VideoProcessor | None) and inputs.takes_pictures:
        return inputs.preprocess
    reason = f": {inputs.no_pictures}" if inputs.no_pictures else ""
    kind, hint = "tensors", f"send {_describe_inputs(inputs)}"
    if inputs.text is not None and inputs.text.takes_text:
        kind, hint = "text", 'send {"text": "a cat"}' if inputs.text.encode else TOKENS_HINT
    raise InputError(f"model {inputs.model} takes {kind}, not pictures, sounds or videos{reason}", hint=hint)


def decode_picture(item: EncodedItem, inputs: ModelInputs, settings: Settings) -> CutRows:
    """A picture as a row of pixels (uint8), to be normalised later, or as the model takes it.

    Pixels take a quarter of the bytes while rows wait or are sent to another process. InputError, TooLargeError.
    """
    row = decode_on_device(item, inputs, settings)
    if row is not None:
        return CutRows({inputs.specs[0].name: row})
    spec = get_preprocessing(inputs)
    check = partial(_check_resized, spec, settings.max_resized_pixels)
    fast = inputs.decode == "fast"
    least_size = partial(compute_least_size, spec) if fast else lambda width, height: None
    picture = decode_image(item.data, settings.max_pixels, least_size, check, spec.background)
    row = make_row(picture.image, spec, picture.size, picture.box, fast=fast).unsqueeze(0)
    return CutRows({inputs.specs[0].name: row}, int(picture.cut))


def make_sound_row(item: EncodedItem | SamplesItem, inputs: ModelInputs, settings: Settings) -> CutRows:
    """A sound as a row of the features that the model takes; InputError, TooLargeError."""
    if (processor := inputs.sound) is None:
        raise InputError(f"model {inputs.model} takes no sounds", hint=f"send {_describe_inputs(inputs)}")
    limits = settings.max_sound_s, settings.max_samples
    if isinstance(item, EncodedItem):
        sound = decode_sound(item.data, *limits)
    else:
        sound = read_samples(item.samples, item.rate, *limits)
    samples = fit_sound(sound, processor.rate, processor.channels)
    row = processor.make_row(samples, tuple(spec.name for spec in inputs.specs))
    return CutRows(row, processor.count_cut(samples.shape[-1]), Origin(sound.rate))


def make_video_row(item: EncodedItem | FramesItem | Array, inputs: ModelInputs, settings: Settings) -> CutRows:
    """A video, the pictures of its frames, or frames (frames, height, width, 3) as a row; InputError, TooLargeError."""
    if (processor := inputs.video) is None:
        raise InputError(f"model {inputs.model} takes no videos", hint=f"send {_describe_inputs(inputs)}")

    def make(image: Image.Image) -> Tensor:
        _check_picture(processor.of_frame, settings, image.width, image.height)
        return processor.make_frame(image)

    def choose(length: int) -> list[int]:
        check_frames(length, settings)
        return processor.choose_frames(length)

    seconds: Sequence[float] = ()
    if isinstance(item, EncodedItem):
        made, numbers, seconds = decode_video(item.data, choose, make, settings)
    elif isinstance(item, FramesItem):
        numbers = choose(len(item.frames))
        files = [item.frames[number].data for number in numbers]
        decode = partial(decode_image, max_pixels=settings.max_pixels, background=processor.of_frame.background)
        made = [make(decode(data).image) for data in files]
    else:
        numbers = choose(len(item))
        made = [make(Image.fromarray(np.ascontiguousarray(item[number]))) for number in numbers]
    row = processor.join_frames(made)[None]
    return CutRows({inputs.specs[0].name: row}, origin=Origin(0, tuple(numbers), tuple(seconds)))


def decode_on_device(item: EncodedItem, inputs: ModelInputs, settings: Settings) -> Tensor | None:
    """A picture as a row that is on the model's GPU; None if the CPU has to decode or refuse it.

    TooLargeError.
    """
    if inputs.decoder is None:
        return None
    check = partial(_check_resized, get_preprocessing(inputs), settings.max_resized_pixels)
    size = get_plain_jpeg_size(item.data, settings.max_pixels, check)
    row = None if size is None else inputs.decoder.decode_row(item.data, size)
    return None if row is None else row.unsqueeze(0)


def normalize_rows(rows: Rows, inputs: ModelInputs) -> Rows:
    """Normalise the rows that are pixels; return others unchanged.

    Arrays have their input's dtype by now, and no input of pictures is one of bytes.
    """
    spec = inputs.preprocess
    if not isinstance(spec, PreprocessSpec) or all(value.dtype != torch.uint8 for value in rows.values()):
        return rows
    return {name: normalize(value, spec) for name, value in rows.items()}


def _fit_pixels(item: ArraysItem, inputs: ModelInputs, settings: Settings) -> Rows:
    """Decoded pictures as rows of pixels, to be normalised later; the same rows as of these pictures in PNG.

    InputError; TooLargeError for more pixels than a picture may have.
    """
    spec, pictures = get_preprocessing(inputs), get_pictures(item, inputs)
    height, width = pictures.shape[1:3]
    _check_picture(spec, settings, width, height)
    images = [Image.fromarray(np.ascontiguousarray(picture)) for picture in pictures]
    rows = [make_row(image, spec, fast=inputs.decode == "fast") for image in images]
    return {inputs.specs[0].name: torch.stack(rows)}


def _check_picture(spec: Preprocessing, settings: Settings, width: int, height: int) -> None:
    """TooLargeError for a picture that has too many pixels, or would have once resized."""
    if height * width > settings.max_pixels:
        detail = f"the picture has {height * width} pixels ({width} by {height}); the limit is {settings.max_pixels}"
        raise TooLargeError(detail, hint="send a smaller picture")
    _check_resized(spec, settings.max_resized_pixels, width, height)


def _check_resized(how: Preprocessing, limit: int, width: int, height: int) -> None:
    """TooLargeError for a picture that would be too large once resized, in either orientation."""
    spec = how if isinstance(how, PreprocessSpec) else how.nearest
    pixels = prod(spec.compute_resized_size(width, height)) if spec is not None else 0
    if pixels > limit:
        raise TooLargeError(
            f"the picture would be resized to {pixels} pixels, the limit is {limit}",
            hint="send a picture that is less long and narrow",
        )


def _check_ids(ids: Tensor, text: TextSpec) -> None:
    """InputError for an id that only the tokenizer may give."""
    if (outside := ids[ids >= text.vocabulary]).numel():
        detail = f"input '{text.ids}' holds {int(outside[0])}, which is not among its values"
        raise InputError(detail, hint=f"send whole numbers from 0 to {text.vocabulary - 1}")


def _convert_arrays(item: ArraysItem, inputs: ModelInputs, settings: Settings) -> Rows:
    """Arrays as rows; InputError if the model does not take them, TooLargeError."""
    batches, text = shape_arrays(item, inputs), inputs.text
    rows = {spec.name: _to_tensor(batches[spec.name], spec) for spec in inputs.specs if spec.name in batches}
    if text is not None and text.mask is not None and text.mask not in rows:
        rows[text.mask] = _make_mask(rows[text.ids], text)
    if text is not None and text.ids in rows and text.marks > 1:
        _check_ids(rows[text.ids], text)
    rows = text.complete(rows) if text is not None else rows
    if inputs.sound is not None and (mask := inputs.mask) is not None and mask not in rows:
        features = next(iter(rows.values()))
        rows[mask] = torch.ones((len(features), get_mask_length(features.shape[1], inputs)), dtype=torch.int64)
    lengths = set()
    for spec, value in zip(inputs.specs, rows.values(), strict=True):
        if prod(value.shape[2:]) > settings.max_resized_pixels:  # height and width may differ, up to a limit
            check_pixels(value.shape[1:], spec, settings.max_resized_pixels)
        if spec.longest and text is not None:  # of a model's own inputs a survey shows which lengths fit each other
            lengths.add(value.shape[1 + spec.long_axis])
    if len(lengths) > 1:
        hint = "send as many mask entries, and token types, as tokens"
        raise InputError("the model's inputs have different lengths", hint=hint)
    counts = {len(value) for value in rows.values()}
    if len(counts) != 1:
        raise InputError(f"the model's inputs have different numbers of rows: {sorted(counts)}")
    if counts == {0}:
        raise InputError("the batch holds no rows")
    if text is not None and text.mask is not None and text.takes_text and text.has_left_padding(rows):
        if text.left_padding == "refused":
            raise InputError(
                "the mask begins with 0, and this model would count the tokens in front of the text as its own",
                hint="send the ids without them",
            )
        rows[text.ids] = rows[text.ids].masked_fill(rows[text.mask].cumsum(1) == 0, text.pad)
    return rows if text is None or text.pads else _cut_padding(rows, text)


def _to_tensor(batch: Array, spec: InputSpec) -> Tensor:
    """An array of rows as a tensor of the input's dtype; InputError if it is of another kind."""
    dtype = DTYPES[spec.dtype]
    if (batch.dtype.kind == "f") != dtype.is_floating_point:
        hint = "send a picture as a picture, or preprocess it yourself" if dtype.is_floating_point else ""
        raise InputError(f"input '{spec.name}' takes {spec.dtype}, not {batch.dtype.name}", hint=hint)
    if batch.dtype.kind == "u" and batch.dtype.itemsize > 1:
        batch = batch.astype(np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array is read-only; the cast below or the model makes a copy
        tensor = torch.from_numpy(np.ascontiguousarray(batch))
    return tensor.to(dtype)


def _make_mask(ids: Tensor, text: TextSpec) -> Tensor:
    """The mask of texts that come without one: each text has the length of its tensor.

    InputError if a layer's output ends like the padding of a shorter text among longer ones.
    """
    tokens = ids.movedim(1 + text.axis, 1)
    if not text.takes_text and not bool(tokens[:, -1].flatten(1).any(1).all()):
        raise InputError(
            "the last position is 0 in every channel, as in a text that was captured beside longer ones",
            hint=f"send the positions of its own tokens only, or a safetensors body with '{text.mask}' beside it",
        )
    return torch.ones(tokens.shape[:2], dtype=torch.int64)


def _cut_padding(rows: dict[str, Tensor], text: TextSpec) -> dict[str, Tensor]:
    """Rows without trailing padding, for a model that can't take any; InputError if lengths differ."""
    if text.mask is None:
        return rows
    mask = rows[text.mask].bool()
    lengths = mask.shape[1] - mask.flip(1).int().argmax(1)  # the whole length for a row without a token
    if bool((lengths != lengths[0]).any()):
        detail = "padding would change this model's texts, and these have several lengths"
        raise InputError(detail, hint="send each as an input of its own")
    return {name: value.narrow(1 + text.axis * (name == text.ids), 0, int(lengths[0])) for name, value in rows.items()}


def _tokenize(item: TextItem | TokensItem, inputs: ModelInputs) -> CutRows:
    """Tokenize one text without padding; InputError if the model does not take it."""
    text = inputs.text
    if text is None or not text.takes_text:
        raise InputError(f"model {inputs.model} takes no text", hint=f"send {_describe_inputs(inputs)}")
    if isinstance(item, TextItem):
        tokens, types, cut = _encode_text(item, text, inputs.model)
    else:
        tokens, types, cut = item.tokens, item.types, 0
        if types is not None and text.types is None:
            raise InputError(f"model {inputs.model} takes no token types", hint="leave 'token_type_ids' out")
    if len(tokens) > text.max_tokens:
        hint = f"send it in several inputs{CUT_HINT if isinstance(item, TextItem) else ''}"
        raise InputError(f"the text has {len(tokens)} tokens, the limit is {text.max_tokens}", hint=hint)
    rows = {text.ids: torch.tensor([tokens], dtype=torch.int64)}
    if isinstance(item, TokensItem) and text.marks > 1:
        _check_ids(rows[text.ids], text)
    if text.mask is not None:
        rows[text.mask] = torch.ones_like(rows[text.ids])
    if types is not None and text.types is not None:
        rows[text.types] = torch.tensor([types], dtype=torch.int64)
    return CutRows(text.complete(rows), cut)


def _encode_text(item: TextItem, text: TextSpec, name: str) -> tuple[Sequence[int], Sequence[int] | None, int]:
    """Tokens of one text or two, token types of two, and the number of dropped tokens; InputError."""
    if text.encode is None:
        raise InputError(f"model {name} has no tokenizer", hint=TOKENS_HINT)
    if item.pair is not None and text.encode_pair is None:
        raise InputError(f"model {name} takes no pairs of texts", hint="leave 'text_pair' out")
    truncate = item.truncate or (text.truncate if item.pair is None else text.side)
    most = max(CHARACTERS * text.max_tokens, CUT_CHARACTERS if text.is_fast and truncate != "none" else 0)
    size = len(item.text) + len(item.pair or "") + sum(map(len, chain.from_iterable(item.messages)))
    if size > most:
        may_cut = text.is_fast and truncate == "none" and size <= CUT_CHARACTERS
        raise InputError(
            f"the text has {size} characters, the limit is {most}",
            hint=f"send it in several inputs{CUT_HINT if may_cut else ''}",
        )
    if item.messages and text.encode_chat is None:
        raise InputError(f"model {name} has no chat template", hint="send the chat as one 'text'")
    types = None
    try:
        if item.messages and text.encode_chat is not None:
            messages = [{"role": role, "content": content} for role, content in item.messages]
            tokens, cut = text.encode_chat(messages, text.max_tokens, truncate)
        elif item.pair is None or text.encode_pair is None:
            encode = text.encode if item.prompt is None else text.encoders[item.prompt]
            tokens, cut = encode(item.text, text.max_tokens, truncate)
        else:
            prompt = text.default_prompt if item.prompt is None else text.prompts[item.prompt]
            tokens, types, cut = text.encode_pair(prompt + item.text, item.pair, text.max_tokens, truncate)
    except InputError:
        raise
    except Exception as error:  # third-party tokenizers raise for lone surrogates, for example
        raise InputError(f"the text can't be tokenized ({type(error).__name__})") from error
    if not tokens:
        raise InputError("the text has no tokens", hint="send a text that is not empty")
    return tokens, types, cut


def pad_texts(items: Items, attempts: Sequence[Sequence[Attempt]], text: TextSpec) -> Sequence[Sequence[Attempt]]:
    """The rows of items with texts and tokens padded to one length; arrays of ids stay unchanged.

    Arrays that a layer made of texts are padded too; texts of a model that runs each at its own length are not.
    """
    kinds = (TextItem, TokensItem) if text.takes_text else (ArraysItem,)
    padded = [of_item if isinstance(item, kinds) else () for (_, item), of_item in zip(items, attempts, strict=True)]
    lengths = [rows[text.ids].shape[1 + text.axis] for each in padded for rows in each if isinstance(rows, Mapping)]
    if text.mask is None or not text.pads or not lengths:
        return attempts
    size = text.get_padded_length(max(lengths))
    return [
        [_pad_rows(rows, size, text) if isinstance(rows, Mapping) else rows for rows in each] or of_item
        for each, of_item in zip(padded, attempts, strict=True)
    ]


def _pad_rows(rows: Rows, size: int, text: TextSpec) -> dict[str, Tensor]:
    """Rows with trailing padding, which the mask leaves out."""
    filled = {}
    for name, value in rows.items():
        axis, pad = (1 + text.axis, text.pad if text.takes_text else 0) if name == text.ids else (1, 0)
        behind = (0, 0) * (value.ndim - axis - 1)  # of the axes after it, the last one first
        filled[name] = torch.constant_pad_nd(value, (*behind, 0, size - value.shape[axis]), pad)
    return CutRows(filled, rows.cut) if isinstance(rows, CutRows) else filled


def _describe_inputs(inputs: ModelInputs) -> str:
    """A description of each input of a model."""
    kind = "videos" if inputs.video is not None else "sounds" if inputs.sound is not None else "pictures"
    media = f"{kind}, or " if inputs.preprocess is not None else ""
    return media + "; ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in inputs.specs)
