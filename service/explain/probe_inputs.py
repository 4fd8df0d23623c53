"""The fixed inputs of probes: the same on every machine and for ever, for nothing but these numbers goes into them."""

from __future__ import annotations

from io import BytesIO
from math import prod, sqrt

import numpy as np
from PIL import Image

from layertap.models.inputs.examples import find_example
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import InputSpec
from layertap.service.features import Array
from layertap.service.inputs.items import ArraysItem, ImageItem, LocalItem, TextItem, TokensItem
from layertap.service.probes import ProbeInput

WIDTH, HEIGHT = 320, 256
TEXT = "a photo of a cat beside a dog"
TOKENS = 8
BITS = 64
FLOATS = ("float16", "float32", "float64")


def make_probe_input(inputs: ModelInputs, *, preprocessed: bool) -> tuple[ProbeInput, LocalItem]:
    """The fixed input for a model: a picture or a text where it takes these, else, or as ``preprocessed``, tensors."""
    if preprocessed:
        return "tensors", _make_arrays(inputs)
    if inputs.preprocess is not None:
        return "picture", ImageItem(make_picture())
    text = inputs.text
    if text is None or not text.is_read:
        return "tensors", _make_arrays(inputs)
    if text.encode is not None:
        return "text", TextItem(TEXT)
    ids = _draw(min(TOKENS, text.max_tokens)) % np.uint64(text.vocabulary)
    return "tokens", TokensItem(tuple(int(each) for each in ids))


def make_picture() -> bytes:
    """A PNG of edges, slopes and noise in all three channels."""
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    checks = (down // 16 + across // 24) % 2 * 255
    drawn = np.stack([across * 255 // WIDTH, down * 255 // HEIGHT, checks], axis=-1)
    noise = (_draw(drawn.size) >> np.uint64(BITS - 6)).astype(np.int64).reshape(drawn.shape)
    stream = BytesIO()
    Image.fromarray((drawn * 3 // 4 + noise).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def _make_arrays(inputs: ModelInputs) -> ArraysItem:
    arrays: dict[str | None, Array] = {spec.name: _make_array(spec) for spec in inputs.specs}
    if inputs.text is not None and inputs.text.mask is not None:
        arrays[inputs.text.mask] = np.ones_like(arrays[inputs.text.mask])
    return ArraysItem(arrays, may_batch=False, by_name=True)


def _make_array(spec: InputSpec) -> Array:
    """The example of an input, else uniform numbers of variance 1, or whole ones that the model takes."""
    if (example := find_example(spec)) is not None:
        found: Array = example[0].float().numpy() if example.is_floating_point() else example[0].numpy()
        return found
    drawn = _draw(prod(spec.shape)).reshape(spec.shape)
    if spec.dtype.endswith(FLOATS):
        return ((drawn / 2.0 ** (BITS - 1) - 1) * sqrt(3)).astype(np.float32)
    low, high = spec.values or (0, 2)
    return (low + (drawn % np.uint64(high - low)).astype(np.int64)).astype(spec.dtype)


def _draw(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """So many whole numbers of 64 bits. numpy promises of a bit generator, and of nothing above it, that it stays."""
    return np.random.PCG64(0).random_raw(count)
