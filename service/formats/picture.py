"""``image/png`` and ``image/webp``: what results look like, for people."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

from layertap.models.errors import TooLargeError
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Features, Receipt
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.reply_format import EncodeOptions
from layertap.service.pictures.overlay import Original
from layertap.service.pictures.panels import ResultInfo, Shape, find_kind
from layertap.service.pictures.sent import SentPicture
from layertap.service.pictures.sheet import OVERLAY, check_size, draw_sheet

Writer = dict[str, Any]
PNG: Writer = {"format": "PNG", "compress_level": 4}
WEBP: Writer = {"format": "WEBP", "lossless": True, "quality": 40, "method": 2}


def encode(features: Features, options: EncodeOptions, writer: Writer) -> Buffers:
    """A sheet of all results, in the order asked for.

    NotAcceptableError: results as int8, whose numbers mean nothing without their scales. TooLargeError: more pixels
    than a sheet may have.
    """
    if features.scales:
        raise NotAcceptableError("pictures are not drawn of int8 results", hint='leave "dtype": "int8" out')
    skipped = set(features.skipped)
    places = tuple(place for place in range(features.rows + len(skipped)) if place not in skipped)
    infos = [
        replace(describe_result(key, features.receipts[key], array.shape), places=places)
        for key, array in features.arrays.items()
    ]
    check_size(infos, options.picture)
    needed = any(find_kind(info).drawing == "overlay" for info in infos)
    originals = _decode(options.sent) if needed else []
    stream = BytesIO()
    draw_sheet(infos, features.arrays, options.picture, originals).save(stream, **writer)
    return [stream.getvalue()]


def describe_result(key: str, receipt: Receipt, shape: Shape) -> ResultInfo:
    """What decides how a result is drawn."""
    chosen = (receipt.tokens, receipt.heads, receipt.queries, receipt.keys)
    return ResultInfo(
        name=key,
        module=receipt.module if receipt.layer in (".", key) else f"{receipt.layer} ({receipt.module})",
        site="" if receipt.method else receipt.site,
        shape=shape,
        row_axis=receipt.row_axis,
        layout=receipt.layout,
        prefix_tokens=receipt.prefix_tokens,
        whole=receipt.pool == "none" and not any(chosen),
        columns=receipt.stats,
        channels=receipt.channels,
        captions=_list_captions(receipt),
        explains=bool(receipt.method),
    )


def _list_captions(receipt: Receipt) -> tuple[str, ...]:
    """Of which class each row's gradient is, where that is told."""
    labels = receipt.labels or ("",) * len(receipt.classes or ())
    pairs = zip(receipt.classes or (), labels, strict=True)
    return tuple(f"class {number}{f': {label}' if label else ''}" for number, label in pairs)


def _decode(sent: Sequence[SentPicture | None]) -> list[Original | None]:
    """What the rows are pictures of; None for what is none, and for what goes beyond all pixels that are decoded."""
    originals: list[Original | None] = []
    left = MAX_DECODED_PIXELS
    for picture in sent:
        original = None
        if picture is not None:
            with suppress(TooLargeError):
                original, pixels = picture.decode(OVERLAY, left)
                left -= pixels
        originals.append(original)
    return originals


MAX_DECODED_PIXELS = 100 * 10**6  # of all originals of a reply: about a second
encode_png = partial(encode, writer=PNG)
encode_webp = partial(encode, writer=WEBP)
