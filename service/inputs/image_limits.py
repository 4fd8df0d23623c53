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

MOST_READS = 10_000  # and one more for each KiB: a piece of a file takes up to three, one of a PNG has 8 KiB
MOST_SIDE = 1_000_000  # Pillow keeps pointers for each row, however short
MOST_SCANS = 100  # encoders write about ten; libtiff takes as many of a JPEG in a TIFF
STRIP_SCANS = 12  # and as many more for each strip there
MOST_MARKS = 1000  # of tables and comments between them, too
MOST_ENTRIES = 4096  # of a TIFF's directory
MOST_NUMBERS, MOST_STRIPS = 250_000, 100_000  # in an entry of a TIFF's directory; that are read one by one
MOST_SAMPLES = 6  # of a pixel, as Pillow has it: each may have strips of its own
MOST_TILE = 4 << 20  # pixels of a TIFF's tile, where the picture has fewer
MOST_RUN_PIXELS = 2_000_000  # run lengths of a BMP are decoded in Python, pixel by pixel at worst

HINT = "send a complete JPEG, PNG, WebP, GIF, BMP or TIFF file"
_SMALLER = "send a smaller picture"
_ANEW = "save it anew, as PNG or baseline JPEG"
_DEFLATED, _LZW = 1032, 2731  # bytes that a byte can stand for
_HUFFMAN, _BOOLEANS = 512, 1024  # pixels that a byte can: a JPEG has a bit for each 64, a lossy WebP two for each 256

_FRAME, _SCAN, _END = b"\xff\xc0", b"\xff\xda", b"\xff\xd9"
_MARK = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts are part of a scan


class Stream(BytesIO):
    """A file in memory of which a decoder may read only so many pieces; beyond them TooLargeError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _reads(data)

    def allow(self, reads: int) -> None:
        """Let it be read so many times more."""
        self._left += reads

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        self._left -= 1
        if self._left < 0:
            raise TooLargeError("the picture's file has too many pieces: chunks, segments or blocks", hint=_ANEW)
        return super().read(size)


def _reads(data: bytes) -> int:
    return MOST_READS + len(data) // 1024


def damaged() -> InputError:
    """What is said of a picture that no decoder makes sense of."""
    return InputError("the picture can't be decoded: damaged, cut short, or of an unsupported kind", hint=HINT)


def check_directory(data: bytes) -> None:
    """Refuse a TIFF that has more entries, or lists more strips and other numbers, than a picture needs.

    TooLargeError with the limit; InputError for tiles whose size is written so that not all who read it agree. What is
    no TIFF passes.
    """
    with suppress(struct.error):  # one cut short: Pillow takes as many entries as there are, too
        for tag, kind, values in _entries(data):
            if values > MOST_NUMBERS and kind not in _TEXTS:
                limit = f"the limit is {MOST_NUMBERS}"
                raise TooLargeError(f"the picture's file lists {values} strips or numbers; {limit}", hint=_ANEW)
            if tag in (_TILE_WIDTH, _TILE_LENGTH) and (values != 1 or kind not in _WHOLE):
                raise damaged()


def _entries(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Tag, kind and number of values of each entry of a TIFF's first directory."""
    order = _ORDERS.get(data[:2])
    if order is None:
        return
    big = data[2:4] in (b"+\x00", b"\x00+")
    first, counted, layout = ("8xQ", "Q", "HHQ8x") if big else ("4xL", "H", "HHL4x")
    (at,) = struct.unpack_from(order + first, data)
    (count,) = struct.unpack_from(order + counted, data, at)
    if count > MOST_ENTRIES:
        raise TooLargeError(f"the picture's file has {count} entries; the limit is {MOST_ENTRIES}", hint=_ANEW)
    entry, at = struct.Struct(order + layout), at + struct.calcsize(order + counted)
    for place in range(at, at + count * entry.size, entry.size):
        yield entry.unpack_from(data, place)


def check(image: ImageFile, data: bytes, stream: Stream) -> None:
    """Look at a picture whose header was read, and at nothing else of ``stream``, before it is decoded.

    InputError: the file is too short for as many pixels, or packed in a way that is not taken.
    TooLargeError: a side, scans, tiles or run lengths over their limit, with the figure.
    """
    if 0 in image.size:
        raise damaged()
    if max(image.size) > MOST_SIDE:
        raise TooLargeError(f"the picture is {max(image.size)} pixels long; the limit is {MOST_SIDE}", hint=_SMALLER)
    own = _CHECKS.get(image.format or "")
    if own is not None:
        own(image, data, stream)


def _jpeg(image: ImageFile, data: bytes, stream: Stream) -> None:
    width, height = image.size
    if len(data) * _HUFFMAN < width * height:
        raise damaged()
    # What follows the picture may hold anything, so that marks are looked at one by one where there seem to be many.
    start = stream.tell()
    if data.count(_SCAN, start) >= MOST_SCANS and _scans(data, start) > MOST_SCANS:
        raise TooLargeError(f"the picture has more than {MOST_SCANS} scans, which is the limit", hint=_ANEW)


def _scans(data: bytes, at: int) -> int:
    """How many scans there are, the one that begins at ``at`` among them; of very many only that they are."""
    scans = 1
    for _ in range(MOST_MARKS):
        found = _MARK.search(data, at)
        if found is None or found[0] == _END:
            return scans
        scans += found[0] == _SCAN
        # As libjpeg does it: marks below these have no length, and what follows others is no place to look for marks.
        length = int.from_bytes(data[found.end() : found.end() + 2], "big") if found[0] >= _FRAME else 0
        at = found.end() + length
    return MOST_MARKS


def _png(image: ImageFile, data: bytes, _: Stream) -> None:
    width, height = image.size
    depth, colour = data[24], data[25]
    least = height * (1 + width * depth * _CHANNELS.get(colour, 1) // 8)
    if len(data) * _DEFLATED < least:
        raise damaged()


def _gif(image: ImageFile, data: bytes, _: Stream) -> None:
    left, upper, right, lower = image.tile[0].extents or (0, 0, 0, 0)
    if len(data) * _LZW < (right - left) * (lower - upper):  # the frame: its screen may be larger
        raise damaged()


def _tiff(image: ImageFile, data: bytes, stream: Stream) -> None:
    tags: Mapping[int, Any] = image.tag_v2  # type: ignore[attr-defined]
    width, height = image.size
    tile = tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0)
    if tile > max(width * height, MOST_TILE):
        detail = f"the picture's tiles have {tile} pixels; the limit is {max(width * height, MOST_TILE)}"
        raise TooLargeError(detail, hint=_ANEW)
    packed = tags.get(_COMPRESSION, 1)
    if packed not in _PACKINGS:
        raise damaged()
    most_scans = MOST_SCANS + STRIP_SCANS * _strips(tags)
    if packed == _AS_JPEG and data.count(_SCAN) > most_scans:
        raise TooLargeError(f"the picture has more than {most_scans} scans, which is the limit", hint=_ANEW)
    most = _UNPACKED.get(packed)
    if most is not None and len(data) * most < width * height * tags.get(_BITS, (1,))[0] // 8:
        raise damaged()
    boxes = [tile.extents or (0, 0, 0, 0) for tile in image.tile]
    covered = sum((right - left) * (lower - upper) for left, upper, right, lower in boxes)
    if covered > MOST_SAMPLES * width * height:  # strips over each other
        raise damaged()
    stream.allow(min(len(image.tile), MOST_STRIPS))


def _strips(tags: Mapping[int, Any]) -> int:
    places = tags.get(_STRIPS, tags.get(_TILES, ()))
    return len(places) if isinstance(places, tuple) else 1


def _webp(image: ImageFile, data: bytes, _: Stream) -> None:
    width, height = image.size
    lossy = b"VP8L" not in data and b"ANMF" not in data  # one colour needs no bits at all; a frame may be small
    if lossy and len(data) * _BOOLEANS < width * height:
        raise damaged()


def _bmp(image: ImageFile, data: bytes, stream: Stream) -> None:
    (tile,) = image.tile
    width, height = image.size
    if tile.codec_name == "raw":
        arguments: Any = tile.args
        if len(data) < tile.offset + arguments[1] * height:
            raise damaged()
    elif width * height > MOST_RUN_PIXELS:
        detail = f"the picture has {width * height} pixels in run lengths; the limit is {MOST_RUN_PIXELS}"
        raise TooLargeError(detail, hint=_ANEW)
    else:
        stream.allow(2 * width * height)


# Tags of a TIFF, and one way to pack its strips.
_BITS, _COMPRESSION, _STRIPS, _TILE_WIDTH, _TILE_LENGTH, _TILES = 258, 259, 273, 322, 323, 324
_AS_JPEG = 7
# No other decoder is reached through a TIFF: libtiff knows those of WebP, LZMA, Zstandard and more.
_PACKINGS = frozenset([1, 2, 3, 4, 5, _AS_JPEG, 8, 32773, 32946])
# Bytes of samples that one can stand for: not packed at all, LZW, JPEG, deflated, PackBits, deflated.
_UNPACKED = {1: 1, 5: _LZW, _AS_JPEG: 4 * _HUFFMAN, 8: _DEFLATED, 32773: 64, 32946: _DEFLATED}
_ORDERS = {b"II": "<", b"MM": ">"}
_TEXTS = frozenset([1, 2, 7])  # kinds of values: bytes, of which nobody makes numbers
_WHOLE = frozenset([3, 4, 16])  # whole numbers without a sign
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG, by its kind of colour

_CHECKS: dict[str, Callable[[ImageFile, bytes, Stream], None]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "GIF": _gif,
    "TIFF": _tiff,
    "WEBP": _webp,
    "BMP": _bmp,
}
