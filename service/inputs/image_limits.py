"""Limits on a picture's file apart from its pixels: pieces that a decoder reads, scans, unused memory.

Decoders read headers piece by piece, in Python, and trust their sizes. A file made to keep a decoder busy, or to make
it allocate more pixels than the file can contain, is refused here.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLEFORMAT, SAMPLESPERPIXEL, TiffImageFile

from layertap.models.errors import InputError, TooLargeError
from layertap.service.errors import UnsupportedMediaError

MAX_READS = 10_000  # plus one for each KiB: a piece of a file takes up to three reads, a PNG's has 8 KiB
MAX_SIDE = 1_000_000  # Pillow keeps pointers for each row, however short
MAX_SCANS = 100  # encoders write about ten
MAX_MARKERS = 1000  # including tables and comments between scans

FORMATS_HINT = "send a complete JPEG, PNG, WebP, AVIF, GIF or BMP file"
_SMALLER_HINT = "send a smaller picture"
_SAVE_HINT = "save it anew, as PNG or baseline JPEG"
# The most pixels per byte (PNG: bytes before Deflate): a JPEG has a bit for each 64, a lossy WebP two for 256.
_PIXELS_PER_BYTE = {"JPEG": 512, "PNG": 1032, "GIF": 2731, "WEBP": 1024}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_TIFF_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"})

_START_OF_FRAME, _START_OF_SCAN, _END_OF_IMAGE = b"\xff\xc0", b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts are part of a scan


class ImageReader(BytesIO):
    """A file in memory; a decoder may read it only a limited number of times, then TooLargeError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = MAX_READS + len(data) // 1024

    def read(self, size: int | None = -1, /) -> bytes:
        """As ``BytesIO.read``."""
        self._left -= 1
        if self._left < 0:
            raise TooLargeError("the picture's file has too many pieces: chunks, segments or blocks", hint=_SAVE_HINT)
        return super().read(size)


def damaged_error() -> InputError:
    """The error of a picture that can't be decoded."""
    return InputError("the picture can't be decoded: damaged, cut short, or of an unsupported kind", hint=FORMATS_HINT)


def pixels_error() -> UnsupportedMediaError:
    """The error of a TIFF with pixels that are not decoded."""
    detail = "the first page of a TIFF must be a whole picture of 8-bit grey, RGB, palette or CMYK pixels"
    return UnsupportedMediaError(detail, hint="send other pixels as an array")


def check_image(image: ImageFile, data: bytes, reader: ImageReader) -> None:
    """Check a picture before it is decoded, but after ``reader`` has read its header.

    InputError: the file is too short for its number of pixels, or uses an unsupported encoding. TooLargeError: a side
    or scans over their limit, with the figure. UnsupportedMediaError: other pixels of a TIFF.
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
        if data[12:16] != b"IHDR":  # it must be the first chunk: Pillow accepts others before it
            raise damaged_error()
        width = 1 + width * data[24] * _PNG_CHANNELS.get(data[25], 1) // 8
    has_any_ratio = image.format == "WEBP" and (b"VP8L" in data or b"ANMF" in data)  # a single colour takes no bits
    ratio = _PIXELS_PER_BYTE.get(image.format or "")
    if ratio is not None and not has_any_ratio and len(data) * ratio < width * height:
        raise damaged_error()
    if image.format == "JPEG":
        _check_scans(data, reader.tell())
    if isinstance(image, TiffImageFile):
        _check_tiff(image)


def _check_bmp(image: ImageFile, data: bytes) -> None:
    (tile,) = image.tile
    arguments: Any = tile.args
    # Run lengths are decoded in Python, at worst pixel by pixel, and are obsolete.
    if tile.codec_name != "raw" or len(data) < tile.offset + arguments[1] * image.height:
        raise damaged_error()


def _check_tiff(image: TiffImageFile) -> None:
    # Pillow cuts 16-bit colours to 8 bits, reads signed bytes as unsigned, leaves bands out, shows previews (tag 254).
    tags = image.tag_v2
    plain = max(tags.get(BITSPERSAMPLE, (1,))) <= 8 and set(tags.get(SAMPLEFORMAT, (1,))) == {1}
    if image.mode not in _TIFF_MODES or not plain or tags.get(SAMPLESPERPIXEL, 1) > 4 or tags.get(254, 0) & 1:
        raise pixels_error()


def _check_scans(data: bytes, start: int) -> None:
    # The bytes after the picture may contain anything, so count exactly if there seem to be many.
    if data.count(_START_OF_SCAN, start) >= MAX_SCANS and _count_scans(data, start) > MAX_SCANS:
        raise TooLargeError(f"the picture has more than {MAX_SCANS} scans, which is the limit", hint=_SAVE_HINT)


def _count_scans(data: bytes, at: int) -> int:
    """The number of scans, including the one that begins at ``at``; for very many, ``MAX_MARKERS``."""
    scans = 1
    for _ in range(MAX_MARKERS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[0] == _END_OF_IMAGE:
            return scans
        scans += marker[0] == _START_OF_SCAN
        # As libjpeg: lower markers have no length, and the content of others is skipped.
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big") if marker[0] >= _START_OF_FRAME else 0
        at = marker.end() + length
    return MAX_MARKERS
