"""What is sent as inputs: made or read once, before the first request."""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.service.load.entry import InputEntry, PictureEntry
from layertap.service.load.request_kind import ScenarioError

BAD_BYTES = 2048
GRAIN = 4  # pixels between two random ones: noise in each pixel would make a JPEG larger than photographs are
QUALITY = 90
MAX_BYTES = 256 * 2**20


class Picture(NamedTuple):
    """An encoded picture and what it is declared as."""

    content: bytes
    media_type: str


Pictures = tuple[Picture, ...]
Rows = NDArray[np.float32]
Inputs = Pictures | Rows


def make_inputs(entry: InputEntry, count: int, folder: Path) -> Sequence[Inputs]:
    """The inputs of one request after another, ``count`` in each; ScenarioError. Files are looked for in ``folder``."""
    if sum(given is not None for given in (entry.picture, entry.random, entry.bad)) != 1:
        raise ScenarioError("input: give exactly one of 'picture', 'random' and 'bad'")
    if entry.random is not None:
        if 4 * count * math.prod(entry.random) > MAX_BYTES:
            raise ScenarioError(f"input.random: rows of more than {MAX_BYTES // 2**20} MiB: take fewer, or smaller")
        return [draw_rows(count, entry.random, entry.seed)]
    if entry.picture is None:
        return [tuple(draw_bad_picture(entry.seed + number) for number in range(count))]
    return _group(_make_pictures(entry.picture, count, folder), count)


def draw_picture(width: int, height: int, seed: int) -> Picture:
    """A JPEG of random blotches."""
    coarse = (-(-height // GRAIN), -(-width // GRAIN), 3)
    pixels = np.random.default_rng(seed).integers(0, 256, coarse, dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=QUALITY)
    return Picture(stream.getvalue(), "image/jpeg")


def draw_rows(count: int, shape: Sequence[int], seed: int) -> Rows:
    """Rows of normally distributed float32."""
    return np.random.default_rng(seed).standard_normal((count, *shape), np.float32)


def draw_bad_picture(seed: int) -> Picture:
    """Random bytes, declared as a picture."""
    return Picture(np.random.default_rng(seed).bytes(BAD_BYTES), "image/jpeg")


def _group(pictures: Pictures, count: int) -> list[Pictures]:
    """So many to a request, until each has been sent; the last request is filled up with the first ones."""
    endless = cycle(pictures)
    return [tuple(islice(endless, count)) for _ in range(-(-len(pictures) // count))]


def _make_pictures(entry: PictureEntry, count: int, folder: Path) -> Pictures:
    if entry.file is not None and entry.size is None:
        path = folder / entry.file
        return tuple(_read_folder(path)) if path.is_dir() else (_read_picture(path),)
    if entry.size is not None and entry.file is None:
        width, height = entry.size
        return tuple(draw_picture(width, height, entry.seed + number) for number in range(max(count, entry.count)))
    raise ScenarioError("input.picture: give a file or a folder, or {size: [WIDTH, HEIGHT], seed: 1}")


def _read_folder(folder: Path) -> Iterator[Picture]:
    """Its pictures, by name; ScenarioError where there is none, or more than is good to hold."""
    paths = [path for path in sorted(folder.iterdir()) if _is_picture(path)]
    if not paths:
        raise ScenarioError(f"input.picture: there is no picture in {folder}")
    if sum(path.stat().st_size for path in paths) > MAX_BYTES:
        limit = MAX_BYTES // 2**20
        raise ScenarioError(f"input.picture: {folder} has more than {limit} MiB of pictures: take some of them")
    yield from map(_read_picture, paths)


def _is_picture(path: Path) -> bool:
    return path.is_file() and (mimetypes.guess_type(path.name)[0] or "").startswith("image/")


def _read_picture(path: Path) -> Picture:
    media_type = mimetypes.guess_type(path.name)[0] or ""
    if not media_type.startswith("image/"):
        raise ScenarioError(f"input.picture: the name {path.name!r} is not that of a picture: use .jpg, .png, .webp")
    try:
        return Picture(path.read_bytes(), media_type)
    except OSError as error:
        raise ScenarioError(f"input.picture: can't read {path}: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise ScenarioError(f"input.picture: can't read {str(path)!r}: {error}") from error
