"""The atlas: a self-contained page with the pictures for which each channel is strongest."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
from PIL import Image

from layertap.models.errors import LayertapError
from layertap.service.bulk.job import Outline
from layertap.service.bulk.sources import Source
from layertap.service.features import Array
from layertap.service.inputs.images import decode_image

PAGE = Path(__file__).with_name("atlas.html")
MARK = b"DATA</script>"
SIZES = ((4_000, 96), (12_000, 64), (40_000, 40))  # up to so many pictures, at most this width and height
MAX_SHOWN = 40_000
SMALL = 32  # width and height of pictures that are shown with visible pixels
MAX_PIXELS = 50_000_000  # of a picture of the source
FIGURES = ("mean", "max", "zeros")


def make_atlas(arrays: Mapping[str, Array], outline: Outline, source: Source, inputs: int, max_bytes: int) -> bytes:
    """The page of a job's results, with small copies of up to 40,000 pictures of the source.

    If the channels need more pictures, each layer's last ones are left out. LayertapError.
    """
    strongest = {layer: arrays[f"{layer}.top_inputs"] for layer in outline.columns if f"{layer}.top_inputs" in arrays}
    if not strongest:
        raise LayertapError("no input has a result", hint="the column 'error' of part-….parquet has their reasons")
    shown = _count_channels(strongest)
    numbers = sorted({int(each) for layer, top in strongest.items() for each in top[:shown].flat})
    pictures = _read_pictures(numbers, source, max_bytes)
    picture_indices = {number: index for index, number in enumerate(numbers)}
    layers = [
        {
            "name": layer,
            "left": max(0, len(top) - shown),
            "channels": _list_channels(layer, arrays, shown, picture_indices),
        }
        for layer, top in strongest.items()
    ]
    facts = {"model": outline.model, "fingerprint": outline.fingerprint, "inputs": inputs}
    data = orjson.dumps({**facts, "layers": layers, "pictures": pictures}).replace(b"<", b"\\u003c")
    return PAGE.read_bytes().replace(MARK, data + b"</script>")


def _count_channels(strongest: Mapping[str, Array]) -> int:
    """The number of channels to show of each layer."""
    shown = max(len(top) for top in strongest.values())
    while len({int(each) for top in strongest.values() for each in top[:shown].flat}) > MAX_SHOWN:
        shown //= 2
    return shown


def _list_channels(
    layer: str, arrays: Mapping[str, Array], shown: int, picture_indices: Mapping[int, int]
) -> list[dict[str, Any]]:
    values, numbers = arrays[f"{layer}.top"], arrays[f"{layer}.top_inputs"]
    figures = {name: arrays[f"{layer}.{name}"].tolist() for name in FIGURES if f"{layer}.{name}" in arrays}
    figures.setdefault("max", values[:, 0].tolist())
    return [
        {
            "number": channel,
            **{name: _get_finite(each[channel]) for name, each in figures.items()},
            "top": [
                (picture_indices[int(number)], _get_finite(float(value)))
                for number, value in zip(numbers[channel], values[channel], strict=True)
            ],
        }
        for channel in range(min(shown, len(numbers)))
    ]


def _get_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read_pictures(numbers: Sequence[int], source: Source, max_bytes: int) -> list[dict[str, Any]]:
    """The key and a small copy of some inputs of a source; no copy if it is no longer a picture."""
    side = next((side for count, side in SIZES if len(numbers) <= count), SIZES[-1][1])
    wanted, pictures = frozenset(numbers), []
    for number, entry in enumerate(source.read(wanted, max_bytes)):
        if number in wanted:
            copy = _make_copy(entry.data, side) if entry.data is not None else {}
            pictures.append({"key": entry.key, **copy})
        if number == numbers[-1]:
            break
    if len(pictures) < len(numbers):
        raise LayertapError("the source has fewer inputs than before", hint="add --restart to begin anew")
    return pictures


def _make_copy(data: bytes, side: int) -> dict[str, Any]:
    """A copy of at most ``side`` pixels as a data URI; tiny pictures stay lossless, and are shown with their pixels."""
    try:
        image = decode_image(data, MAX_PIXELS, lambda width, height: (min(side, width), min(side, height))).image
    except LayertapError:
        return {}
    small = max(image.size) <= SMALL
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "WEBP", quality=80, lossless=small, method=2)
    return {"uri": "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode(), "small": small}
