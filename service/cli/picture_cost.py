"""What ``layertap check`` says of pictures: who makes their rows, what that takes, and what 16-bit ones become."""

from __future__ import annotations

import statistics
import time
from io import BytesIO

import numpy as np
from PIL import Image

from layertap.models.inputs.library_processor import LibraryProcessor
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import make_row
from layertap.service.inputs.images import decode_image

SIZE = (640, 427)
ROUNDS = 5


def describe_pictures(inputs: ModelInputs) -> str:
    """Whether pictures take the fast path, and the milliseconds of one once it is decoded; or why none are taken."""
    how = inputs.preprocess
    if how is None or not inputs.takes_pictures:
        return f"no pictures: {inputs.no_pictures}" if inputs.no_pictures else ""
    image = Image.linear_gradient("L").resize(SIZE).convert("RGB")
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        make_row(image, how)
        seconds.append(time.perf_counter() - started)
    way = f"through {how.name}" if isinstance(how, LibraryProcessor) else "on the fast path"
    return f"pictures {way}, {statistics.median(seconds) * 1000:.1f} ms each of {SIZE[0]} by {SIZE[1]}"


def compare_deep_pictures() -> str:
    """How a picture of 16-bit gray differs from what Pillow's ``convert`` makes of it, if it does."""
    stream = BytesIO()
    Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256)).save(stream, "PNG")
    ours = np.asarray(decode_image(stream.getvalue(), 2**16), np.int64)
    with Image.open(stream) as image:
        converted = np.asarray(image.convert("RGB"), np.int64)
    steps = int(np.abs(ours - converted).max())
    text = f"16-bit gray is scaled to 8 bits; Pillow's convert, which libraries use, differs by up to {steps} of 255"
    return text if steps else ""
