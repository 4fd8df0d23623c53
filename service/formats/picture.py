"""``image/png``: a drawing of the results, for people."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO

from PIL import Image

from layertap.models.errors import TooLargeError
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Features, Receipt
from layertap.service.formats.buffers import Buffers, EncodeOptions
from layertap.service.pictures.overlay import OVERLAY, Original, SentPicture
from layertap.service.pictures.panels import ResultInfo, Shape
from layertap.service.pictures.sheet import check_sheet, draw_sheet, shows_originals

COMPRESS_LEVEL = 4
MAX_DECODED_PIXELS = 100 * 10**6  # of all originals of a reply: about a second


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """A sheet of all results in their order, or the pixels of an optimised picture.

    NotAcceptableError for int8 results, TooLargeError for too many pixels.
    """
    if features.pixels is not None:
        return _write(Image.fromarray(features.pixels))
    if features.scales:
        raise NotAcceptableError("pictures are not drawn of int8 results", hint='leave "dtype": "int8" out')
    skipped = set(features.skipped)
    indexes = tuple(index for index in range(features.rows + len(skipped)) if index not in skipped)
    infos = []
    for key, array in features.arrays.items():
        own = (int(key.rpartition(".input")[2]),) if key in features.by_input else indexes
        infos.append(_describe(key, features.receipts[key], array.shape, own))
    check_sheet(infos, options.tiles)
    originals = _decode(dict(zip(indexes, options.originals, strict=False))) if shows_originals(infos) else {}
    return _write(draw_sheet(infos, features.arrays, options.tiles, originals))


def _write(image: Image.Image) -> Buffers:
    stream = BytesIO()
    image.save(stream, "PNG", compress_level=COMPRESS_LEVEL)
    return [stream.getvalue()]


def _describe(key: str, receipt: Receipt, shape: Shape, indexes: tuple[int, ...]) -> ResultInfo:
    """The properties that determine a result's drawing."""
    is_named = key.partition(":")[0] == receipt.layer
    chosen = (receipt.tokens, receipt.heads, receipt.queries, receipt.keys)
    return ResultInfo(
        name=key,
        module=receipt.module if receipt.layer == "." or is_named else f"{receipt.layer} ({receipt.module})",
        site=receipt.site,
        shape=shape,
        row_axis=receipt.row_axis,
        layout="NCHW" if receipt.grid else receipt.layout,
        prefix_tokens=receipt.prefix_tokens,
        whole=receipt.pool == "none" and not any(chosen),
        columns=receipt.stats,
        channels=receipt.channels,
        captions=_list_captions(receipt),
        input_indexes=indexes,
        grid_size=receipt.grid_size,
        method=receipt.method,
    )


def _list_captions(receipt: Receipt) -> tuple[str, ...]:
    """The class that each row's gradient is of, if receipts have it."""
    labels = receipt.labels or ("",) * len(receipt.classes or ())
    pairs = zip(receipt.classes or (), labels, strict=True)
    return tuple(f"class {number}{f': {label}' if label else ''}" for number, label in pairs)


def _decode(sent: Mapping[int, SentPicture | None]) -> dict[int, Original]:
    """The decoded pictures by input index, up to ``MAX_DECODED_PIXELS`` together."""
    originals: dict[int, Original] = {}
    left = MAX_DECODED_PIXELS
    for index, picture in sent.items():
        if picture is not None:
            with suppress(TooLargeError):
                originals[index], pixels = picture.decode(OVERLAY, left)
                left -= pixels
    return originals
