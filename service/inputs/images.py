"""Decodes pictures to upright RGB.

The first bytes decide the format, whose plugin alone decodes the picture: neither a label nor another decoder (EPS
would start Ghostscript) is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, ExifTags, Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.models.spec import Box, Color
from layertap.service.inputs.image_limits import FORMATS_HINT, ImageReader, check_image, damaged_error, pixels_error
from layertap.service.inputs.items import TIFF_STARTS

_SMALLER_HINT = "send a smaller picture"
_JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_OTHER_PIXELS = frozenset({"unknown pixel mode", "Invalid value for samples per pixel"})  # Pillow's words for a TIFF
_HEIF_HINT = 'send a JPEG or a PNG; the operator types pip install "layertap[heif]"'
MAX_BRANDS = 64
_pillow_limit = Lock()
CheckSize = Callable[[int, int], None]


@dataclass(frozen=True)
class Picture:
    """A decoded picture, upright and RGB.

    ``size``: its full width and height. If it was decoded smaller, ``box`` is the part of ``image`` with the picture:
    the last column and row of a reduced image may be only partly covered. ``cut``: there are more pages.
    """

    image: Image.Image
    size: tuple[int, int]
    box: Box | None = None
    cut: bool = False


def decode_image(
    data: bytes,
    max_pixels: int,
    choose_least_size: Callable[[int, int], tuple[int, int] | None] = lambda width, height: None,
    check_size: CheckSize = lambda width, height: None,
    background: Color | None = None,
) -> Picture:
    """The first frame or page of an encoded picture as 8-bit RGB, fully loaded and upright by its EXIF orientation.

    Alpha is dropped, or transparent pixels show ``background``; 16-bit gray is scaled to 8 bits, an invalid EXIF block
    is ignored. ``check_size`` gets the stored width and height before decoding, and raises if the picture is unusable.

    ``choose_least_size`` gets the upright picture's width and height and returns the least sufficient ones, or None if
    the full size is needed. A large JPEG is decoded at a half, a quarter or an eighth of its width and height: libjpeg
    then leaves out the higher frequencies of each block, which is less work than decoding and averaging them.

    InputError: an unknown format, damaged, cut short, or an unsupported kind. UnsupportedMediaError: other pixels of a
    TIFF. TooLargeError: more than ``max_pixels`` at full size, before decoding; or refused by ``image_limits``.
    """
    image = _open(data, max_pixels, check_size)
    if not isinstance(image, JpegImageFile):
        whole = _decode_whole(image, background)
        return Picture(whole, whole.size, cut=isinstance(image, TiffImageFile) and image.is_animated)
    turn = read_turn(image)
    size = turn_size(image.size, turn)
    least_size = choose_least_size(*size)
    margins = _reduce(image, turn_size(least_size, turn)) if least_size else None
    try:
        with _translate_errors():
            reduced = apply_turn(load_rgb(image), turn)
    except InputError:
        if margins is None:
            raise
        # A lossless JPEG can't be scaled. For a damaged one, full decoding raises the error.
        return decode_image(data, max_pixels)
    return Picture(reduced, size, _cut_margins(reduced, turn_margins(margins, turn)) if margins else None)


def get_plain_jpeg_size(
    data: bytes, max_pixels: int, check_size: CheckSize = lambda width, height: None
) -> tuple[int, int] | None:
    """Width and height of a JPEG that all decoders should decode alike; None for all other bytes.

    It is complete, upright, gray or YCbCr, with consistent headers. ``check_size`` and TooLargeError as for
    ``decode_image``; damaged files are left to the other decoders.
    """
    if not data.startswith(_JPEG_START) or not data.endswith(_JPEG_END):
        return None
    try:
        image = _open(data, max_pixels, check_size)
    except InputError:
        return None
    plain = isinstance(image, JpegImageFile) and read_turn(image) is None and (image.layers == 1 or _is_ycc(image))
    return image.size if plain else None


def _is_ycc(image: JpegImageFile) -> bool:
    """Whether three components are YCbCr by every marker; decoders resolve contradictory ones differently."""
    transform, ids = image.info.get("adobe_transform"), tuple(part[0] for part in image.layer)
    declared = "jfif" in image.info or transform == 1
    return image.layers == 3 and transform in (None, 1) and (declared or "adobe" not in image.info) and ids == (1, 2, 3)


def _open(data: bytes, max_pixels: int, check_size: CheckSize) -> ImageFile:
    if not data:
        raise InputError("the picture is empty: it has no bytes", hint=FORMATS_HINT)
    plugin = _choose_plugin(data)
    _raise_pillow_limit(max_pixels)
    reader = ImageReader(data)
    try:
        image = plugin(reader)
    except (LayertapError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        detail = f"the picture has more than {Image.MAX_IMAGE_PIXELS} pixels; the limit is {max_pixels}"
        raise TooLargeError(detail, hint=_SMALLER_HINT) from error
    except Exception as error:  # a plugin may raise anything for a broken header
        raise (pixels_error() if str(error) in _OTHER_PIXELS else damaged_error()) from error
    if len(image.tile) == 1:  # not strips of a TIFF
        # Read in one piece: at each piece the decoder would release the GIL and wait for it again.
        image.decodermaxblock = max(len(data), image.decodermaxblock)
    width, height = image.size
    if width * height > max_pixels:
        detail = f"the picture has {width * height} pixels ({width} by {height}); the limit is {max_pixels}"
        raise TooLargeError(detail, hint=_SMALLER_HINT)
    with _translate_errors():
        check_image(image, data, reader)
    check_size(width, height)
    return image


def _choose_plugin(data: bytes) -> type[ImageFile]:
    if data[4:8] == b"ftyp":
        for brand in _list_brands(data):
            if brand in _BRANDS:
                return _BRANDS[brand]()
    for start, plugin in _PLUGINS.items():
        if data.startswith(start) and (plugin is not WebPImageFile or data[8:12] == b"WEBP"):
            return plugin
    raise InputError("the bytes are not a picture of a known format", hint=FORMATS_HINT)


def _list_brands(data: bytes) -> Iterator[bytes]:
    """The brands of an ISO media file: the major one, then the compatible ones."""
    end = min(int.from_bytes(data[:4], "big"), MAX_BRANDS * 4, len(data))
    return (data[at : at + 4] for at in (8, *range(16, end, 4)))


def _get_avif() -> type[ImageFile]:
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # several pictures are decoded at once already
    return AvifImageFile


def _get_heif() -> type[ImageFile]:
    try:
        from pillow_heif import HeifImageFile, options
    except ImportError:
        raise InputError("HEIC pictures need pillow-heif, which is not installed here", hint=_HEIF_HINT) from None
    options.DECODE_THREADS = 1
    return cast("type[ImageFile]", HeifImageFile)


def _raise_pillow_limit(max_pixels: int) -> None:
    # Pillow has its own limit, at which it warns, and raises at twice as many pixels; GIF checks it again while it
    # loads. It is only raised, and under a lock, so that concurrent callers can't lower it for each other.
    with _pillow_limit:
        if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels


def _reduce(image: JpegImageFile, least_size: tuple[int, int]) -> Box | None:
    """Set up a picture to be decoded smaller; None if it is too small for that.

    Returns by how much the image's sides then exceed the picture's, because scaled sizes are rounded up.
    """
    full_size = image.size
    draft = image.draft(None, least_size)
    if draft is None or image.size == full_size:
        return None
    _, (left, upper, right, lower) = draft
    return left, upper, image.width - right, image.height - lower


def _cut_margins(image: Image.Image, margins: Box) -> Box:
    """The part of an image without its margins."""
    left, upper, right, lower = margins
    return left, upper, image.width - right, image.height - lower


def _decode_whole(image: ImageFile, background: Color | None) -> Image.Image:
    with _translate_errors():
        # PNG may store its EXIF after the pixels: read the orientation last.
        pixels = image.width * image.height
        rgb = load_rgb(image, background)
        if rgb.width * rgb.height != pixels:  # an ISO box may give another size than the pixels have
            raise damaged_error()
        return apply_turn(rgb, read_turn(image))


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert any error of a decoder in the block to an InputError."""
    try:
        yield
    except (LayertapError, MemoryError):
        raise
    except Exception as error:  # decoders may raise anything for broken data
        if "truncated" in str(error):  # Pillow's word, also for a JPEG that lacks only its end marker
            raise InputError("the picture is cut short", hint=FORMATS_HINT) from error
        raise damaged_error() from error


_PLUGINS: dict[bytes, type[ImageFile]] = {
    _JPEG_START: JpegImageFile,
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"RIFF": WebPImageFile,
    b"GIF87a": GifImageFile,
    b"GIF89a": GifImageFile,
    b"BM": BmpImageFile,
    **dict.fromkeys(TIFF_STARTS, TiffImageFile),
}
_BRANDS: dict[bytes, Callable[[], type[ImageFile]]] = {
    **dict.fromkeys((b"avif", b"avis"), _get_avif),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), _get_heif),
}


_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset(_TURNS[orientation] for orientation in (5, 6, 7, 8))
_SIDES: dict[Image.Transpose | None, tuple[int, int, int, int]] = {  # for each side, its index before the turn
    None: (0, 1, 2, 3),
    Image.Transpose.FLIP_LEFT_RIGHT: (2, 1, 0, 3),
    Image.Transpose.ROTATE_180: (2, 3, 0, 1),
    Image.Transpose.FLIP_TOP_BOTTOM: (0, 3, 2, 1),
    Image.Transpose.TRANSPOSE: (1, 0, 3, 2),
    Image.Transpose.ROTATE_270: (3, 0, 1, 2),
    Image.Transpose.TRANSVERSE: (3, 2, 1, 0),
    Image.Transpose.ROTATE_90: (1, 2, 3, 0),
}


def read_turn(image: ImageFile) -> Image.Transpose | None:
    """The transpose that turns a picture upright; None if there is none, or its EXIF is invalid.

    Call it once: for a broken EXIF block, Pillow may return something else the second time.
    """
    try:
        value: object = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a broken EXIF block does not affect the picture
        return None
    return _TURNS.get(value) if isinstance(value, int) else None


def apply_turn(image: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    """The picture after a turn."""
    return image if turn is None else image.transpose(turn)


def turn_size(size: tuple[int, int], turn: Image.Transpose | None) -> tuple[int, int]:
    """Width and height before a turn from those after it, or the other way round."""
    width, height = size
    return (height, width) if turn in _SIDEWAYS else (width, height)


def turn_margins(margins: Box, turn: Image.Transpose | None) -> Box:
    """The margins of a picture after a turn from those before it: left, upper, right, lower."""
    left, upper, right, lower = (margins[side] for side in _SIDES[turn])
    return left, upper, right, lower


_CHUNK = 1 << 20
_ALPHA = {"RGBA": "RGBA", "LA": "LA", "PA": "RGBA"}  # modes with alpha, and the mode that keeps it
_KEYED = frozenset({"1", "L", "P", "RGB"})  # modes that may have a transparent colour


def load_rgb(image: ImageFile, background: Color | None = None) -> Image.Image:
    """Decode a picture whose header was read; alpha is dropped, or shows a ``background``.

    Any error of the decoder is raised unchanged.
    """
    image.load()
    if background is not None and (image.mode in _ALPHA or (image.mode in _KEYED and "transparency" in image.info)):
        canvas = Image.new("RGBA", image.size, (*background, 255))
        opaque = Image.alpha_composite(canvas, image.convert(_ALPHA.get(image.mode, "RGBA")).convert("RGBA"))
        return opaque.convert("RGB")
    # RGB needs no transparent colour, and Pillow warns if it can't convert it.
    image.info.pop("transparency", None)
    if image.mode.startswith("I;16"):
        return _convert_gray16(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _convert_gray16(image: Image.Image) -> Image.Image:
    """Scale 65535 to 255; ``convert`` would clip at 255 instead."""
    table = ((np.arange(65536, dtype=np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    values: NDArray[Any] = np.asarray(image)
    gray = np.empty(values.shape, np.uint8)
    source, target = values.reshape(-1), gray.reshape(-1)
    for start in range(0, source.size, _CHUNK):  # in chunks, because indices are widened to 64 bits
        target[start : start + _CHUNK] = table[source[start : start + _CHUNK]]
    return Image.fromarray(gray).convert("RGB")
