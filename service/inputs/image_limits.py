"""What a picture's file may cost beside its pixels: pieces that a decoder goes through, scans, memory for nothing.

Decoders read headers piece by piece, in Python, and believe what these say. A file that is made to keep one busy, or to
have it take memory for pixels that the file can't hold, is refused here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

from PIL.ImageFile import ImageFile

from layertap.models.errors import InputError, TooLargeError

MAX_READS = 10_000  # and one more for each KiB: a piece of a file takes up to three, one of a PNG has 8 KiB
MAX_SIDE = 1_000_000  # Pillow keeps pointers for each row, however short
MAX_SCANS = 100  # encoders write about ten; libtiff takes as many of a JPEG in a TIFF
SCANS_PER_STRIP = 12  # and as many more for each strip there
MAX_MARKERS = 1000  # of tables and comments between them, too
MAX_ENTRIES = 4096  # of a TIFF's directory
MAX_NUMBERS, MAX_STRIPS = 250_000, 100_000  # in an entry of a TIFF's directory; that are read one by one
MAX_SAMPLES = 6  # of a pixel, as Pillow has it: each may have strips of its own
MAX_TILE_PIXELS = 4 << 20  # pixels of a TIFF's tile, where the picture has fewer
MAX_RUN_PIXELS = 2_000_000  # run lengths of a BMP are decoded in Python, pixel by pixel at worst

FORMATS_HINT = "send a complete JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF file"
_SMALLER_HINT = "send a smaller picture"
_SAVE_HINT = "save it anew, as PNG or baseline JPEG"
_DEFLATE_RATIO, _LZW_RATIO = 1032, 2731  # bytes that a byte can stand for
# Pixels that a byte can stand for: a JPEG has a bit for each 64, a lossy WebP two for each 256.
_HUFFMAN_PIXELS, _VP8_PIXELS = 512, 1024

_START_OF_FRAME, _START_OF_SCAN, _END_OF_IMAGE = b"\xff\xc0", b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts are part of a scan


class ImageReader(BytesIO):
    """A file in memory of which a decoder may read only so many pieces; beyond them TooLargeError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _count_reads(data)

    def allow(self, reads: int) -> None:
        """Let it be read so many times more."""
        self._left += reads

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        self._left -= 1
        if self._left < 0:
            raise TooLargeError("the picture's file has too many pieces: chunks, segments or blocks", hint=_SAVE_HINT)
        return super().read(size)


def _count_reads(data: bytes) -> int:
    return MAX_READS + len(data) // 1024


def damaged_error() -> InputError:
    """What is said of a picture that no decoder makes sense of."""
    return InputError("the picture can't be decoded: damaged, cut short, or of an unsupported kind", hint=FORMATS_HINT)


def check_tiff(data: bytes) -> None:
    """Refuse a TIFF that has more entries, or lists more strips and other numbers, than a picture needs.

    TooLargeError with the limit; InputError for tiles whose size is written so that not all who read it agree. What is
    no TIFF passes.
    """
    with suppress(struct.error):  # one cut short: Pillow takes as many entries as there are, too
        for tag, value_type, values in _read_entries(data):
            if values > MAX_NUMBERS and value_type not in _BYTE_TYPES:
                limit = f"the limit is {MAX_NUMBERS}"
                raise TooLargeError(f"the picture's file lists {values} strips or numbers; {limit}", hint=_SAVE_HINT)
            if tag in (_TILE_WIDTH, _TILE_LENGTH) and (values != 1 or value_type not in _UNSIGNED_TYPES):
                raise damaged_error()


def _read_entries(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Tag, type and number of values of each entry of a TIFF's first directory."""
    order = _BYTE_ORDERS.get(data[:2])
    if order is None:
        return
    big = data[2:4] in (b"+\x00", b"\x00+")
    first, counted, layout = ("8xQ", "Q", "HHQ8x") if big else ("4xL", "H", "HHL4x")
    (at,) = struct.unpack_from(order + first, data)
    (count,) = struct.unpack_from(order + counted, data, at)
    if count > MAX_ENTRIES:
        raise TooLargeError(f"the picture's file has {count} entries; the limit is {MAX_ENTRIES}", hint=_SAVE_HINT)
    entry, at = struct.Struct(order + layout), at + struct.calcsize(order + counted)
    for place in range(at, at + count * entry.size, entry.size):
        yield entry.unpack_from(data, place)


def check_image(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    """Check a picture whose header was read, and nothing else of ``reader``, before it is decoded.

    InputError: the file is too short for as many pixels, or packed in a way that is not taken.
    TooLargeError: a side, scans, tiles or run lengths over their limit, with the figure.
    """
    if 0 in image.size:
        raise damaged_error()
    if max(image.size) > MAX_SIDE:
        raise TooLargeError(
            f"the picture is {max(image.size)} pixels long; the limit is {MAX_SIDE}", hint=_SMALLER_HINT
        )
    check_format = _CHECKS.get(image.format or "")
    if check_format is not None:
        check_format(image, data, reader)


def _check_jpeg(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    width, height = image.size
    if len(data) * _HUFFMAN_PIXELS < width * height:
        raise damaged_error()
    # What follows the picture may hold anything, so that marks are looked at one by one where there seem to be many.
    start = reader.tell()
    if data.count(_START_OF_SCAN, start) >= MAX_SCANS and _count_scans(data, start) > MAX_SCANS:
        raise TooLargeError(f"the picture has more than {MAX_SCANS} scans, which is the limit", hint=_SAVE_HINT)


def _count_scans(data: bytes, at: int) -> int:
    """How many scans there are, the one that begins at ``at`` among them; of very many only that they are."""
    scans = 1
    for _ in range(MAX_MARKERS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[0] == _END_OF_IMAGE:
            return scans
        scans += marker[0] == _START_OF_SCAN
        # As libjpeg does it: marks below these have no length, and what follows others is no place to look for marks.
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big") if marker[0] >= _START_OF_FRAME else 0
        at = marker.end() + length
    return MAX_MARKERS


def _check_png(image: ImageFile, data: bytes, _: ImageReader) -> None:
    width, height = image.size
    depth, colour = data[24], data[25]
    least = height * (1 + width * depth * _CHANNELS.get(colour, 1) // 8)
    if len(data) * _DEFLATE_RATIO < least:
        raise damaged_error()


def _check_gif(image: ImageFile, data: bytes, _: ImageReader) -> None:
    left, upper, right, lower = image.tile[0].extents or (0, 0, 0, 0)
    if len(data) * _LZW_RATIO < (right - left) * (lower - upper):  # the frame: its screen may be larger
        raise damaged_error()


def _check_tiff_image(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    tags: Mapping[int, Any] = image.tag_v2  # type: ignore[attr-defined]
    width, height = image.size
    tile = tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0)
    if tile > max(width * height, MAX_TILE_PIXELS):
        detail = f"the picture's tiles have {tile} pixels; the limit is {max(width * height, MAX_TILE_PIXELS)}"
        raise TooLargeError(detail, hint=_SAVE_HINT)
    compression = tags.get(_COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise damaged_error()
    max_scans = MAX_SCANS + SCANS_PER_STRIP * _count_strips(tags)
    if compression == _JPEG_COMPRESSION and data.count(_START_OF_SCAN) > max_scans:
        raise TooLargeError(f"the picture has more than {max_scans} scans, which is the limit", hint=_SAVE_HINT)
    max_ratio = _MAX_RATIOS.get(compression)
    if max_ratio is not None and len(data) * max_ratio < width * height * tags.get(_BITS_PER_SAMPLE, (1,))[0] // 8:
        raise damaged_error()
    boxes = [tile.extents or (0, 0, 0, 0) for tile in image.tile]
    covered = sum((right - left) * (lower - upper) for left, upper, right, lower in boxes)
    if covered > MAX_SAMPLES * width * height:  # strips over each other
        raise damaged_error()
    reader.allow(min(len(image.tile), MAX_STRIPS))


def _count_strips(tags: Mapping[int, Any]) -> int:
    places = tags.get(_STRIP_OFFSETS, tags.get(_TILE_OFFSETS, ()))
    return len(places) if isinstance(places, tuple) else 1


def _check_webp(image: ImageFile, data: bytes, _: ImageReader) -> None:
    width, height = image.size
    lossy = b"VP8L" not in data and b"ANMF" not in data  # one colour needs no bits at all; a frame may be small
    if lossy and len(data) * _VP8_PIXELS < width * height:
        raise damaged_error()


def _check_bmp(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    (tile,) = image.tile
    width, height = image.size
    if tile.codec_name == "raw":
        arguments: Any = tile.args
        if len(data) < tile.offset + arguments[1] * height:
            raise damaged_error()
    elif width * height > MAX_RUN_PIXELS:
        detail = f"the picture has {width * height} pixels in run lengths; the limit is {MAX_RUN_PIXELS}"
        raise TooLargeError(detail, hint=_SAVE_HINT)
    else:
        reader.allow(2 * width * height)


# Tags of a TIFF, and one way to pack its strips.
_BITS_PER_SAMPLE, _COMPRESSION, _STRIP_OFFSETS, _TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS = 258, 259, 273, 322, 323, 324
_JPEG_COMPRESSION = 7
# No other decoder is reached through a TIFF: libtiff knows those of WebP, LZMA, Zstandard and more.
_COMPRESSIONS = frozenset([1, 2, 3, 4, 5, _JPEG_COMPRESSION, 8, 32773, 32946])
_MAX_RATIOS = {  # bytes of samples that one byte can stand for
    1: 1,  # not packed at all
    5: _LZW_RATIO,
    _JPEG_COMPRESSION: 4 * _HUFFMAN_PIXELS,
    8: _DEFLATE_RATIO,
    32773: 64,  # PackBits
    32946: _DEFLATE_RATIO,
}
_BYTE_ORDERS = {b"II": "<", b"MM": ">"}
_BYTE_TYPES = frozenset([1, 2, 7])  # types of values: bytes, of which nobody makes numbers
_UNSIGNED_TYPES = frozenset([3, 4, 16])  # whole numbers without a sign
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG, by its kind of colour

_CHECKS: dict[str, Callable[[ImageFile, bytes, ImageReader], None]] = {
    "JPEG": _check_jpeg,
    "PNG": _check_png,
    "GIF": _check_gif,
    "TIFF": _check_tiff_image,
    "WEBP": _check_webp,
    "BMP": _check_bmp,
}
