"""What a picture's file may cost beside its pixels: pieces that a decoder goes through, scans, memory for nothing.

Decoders read headers piece by piece, in Python, and believe what these say. A file that is made to keep one busy, or to
have it take memory for pixels that the file can't hold, is refused here.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from PIL.ImageFile import ImageFile

from layertap.models.errors import InputError, TooLargeError

MAX_READS = 10_000  # and one more for each KiB: a piece of a file takes up to three, one of a PNG has 8 KiB
MAX_SIDE = 1_000_000  # Pillow keeps pointers for each row, however short
MAX_SCANS = 100  # encoders write about ten
MAX_MARKERS = 1000  # of tables and comments between them, too

FORMATS_HINT = "send a complete JPEG, PNG, WebP, AVIF, GIF or BMP file"
_SMALLER_HINT = "send a smaller picture"
_SAVE_HINT = "save it anew, as PNG or baseline JPEG"
# Pixels that a byte can stand for (of a PNG bytes, by Deflate): a JPEG has a bit for each 64, a lossy WebP two for 256.
_PIXELS_PER_BYTE = {"JPEG": 512, "PNG": 1032, "GIF": 2731, "WEBP": 1024}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by its kind of colour

_START_OF_FRAME, _START_OF_SCAN, _END_OF_IMAGE = b"\xff\xc0", b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts are part of a scan


class ImageReader(BytesIO):
    """A file in memory of which a decoder may read only so many pieces; beyond them TooLargeError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = MAX_READS + len(data) // 1024

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file's."""
        self._left -= 1
        if self._left < 0:
            raise TooLargeError("the picture's file has too many pieces: chunks, segments or blocks", hint=_SAVE_HINT)
        return super().read(size)


def damaged_error() -> InputError:
    """What is said of a picture that no decoder makes sense of."""
    return InputError("the picture can't be decoded: damaged, cut short, or of an unsupported kind", hint=FORMATS_HINT)


def check_image(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    """Check a picture whose header was read, and nothing else of ``reader``, before it is decoded.

    InputError: the file is too short for as many pixels, or packed in a way that is not taken.
    TooLargeError: a side or scans over their limit, with the figure.
    """
    width, height = image.size
    if 0 in image.size:
        raise damaged_error()
    if max(image.size) > MAX_SIDE:
        raise TooLargeError(
            f"the picture is {max(image.size)} pixels long; the limit is {MAX_SIDE}", hint=_SMALLER_HINT
        )
    if image.format == "BMP":
        _check_bmp(image, data)
    if image.format == "GIF":  # its screen may be larger than the frame
        left, upper, right, lower = image.tile[0].extents or (0, 0, 0, 0)
        width, height = right - left, lower - upper
    if image.format == "PNG":
        if data[12:16] != b"IHDR":  # which is the first of its parts: Pillow takes others before it
            raise damaged_error()
        width = 1 + width * data[24] * _PNG_CHANNELS.get(data[25], 1) // 8
    has_any_ratio = image.format == "WEBP" and (b"VP8L" in data or b"ANMF" in data)  # one colour needs no bits at all
    ratio = _PIXELS_PER_BYTE.get(image.format or "")
    if ratio is not None and not has_any_ratio and len(data) * ratio < width * height:
        raise damaged_error()
    if image.format == "JPEG":
        _check_scans(data, reader.tell())


def _check_bmp(image: ImageFile, data: bytes) -> None:
    (tile,) = image.tile
    arguments: Any = tile.args
    # Run lengths are decoded in Python, pixel by pixel at worst; nobody writes them any more.
    if tile.codec_name != "raw" or len(data) < tile.offset + arguments[1] * image.height:
        raise damaged_error()


def _check_scans(data: bytes, start: int) -> None:
    # What follows the picture may hold anything, so that marks are looked at one by one where there seem to be many.
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
