"""Large pictures, which are decoded one at a time, before their batch: answered as any others, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layertap.service.engine.prepare.job_maker import LARGE_PIXELS
from layertap.service.inputs.image_size import count_pixels
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.inputs.test_images import encode
from tests.service.support import Array, arrays_of, image

GRAIN = Image.fromarray(np.random.default_rng(3).integers(0, 256, (30, 50, 3), np.uint8))
LARGE = GRAIN.resize((4000, LARGE_PIXELS // 4000), Image.Resampling.NEAREST)


@pytest.fixture(scope="module")
def live(serve: Serve) -> Iterator[Live]:
    """A server with workers."""
    with serve(workers=1) as started:
        yield started


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})],
)
def test_pixels_of_header(kind: str, options: dict[str, Any]) -> None:
    """A file's header says how many pixels it has; a cut one says nothing."""
    for picture in (GRAIN, GRAIN.convert("RGBA") if kind == "WEBP" else GRAIN.convert("L")):
        file = BytesIO()
        picture.save(file, kind, **options)
        assert count_pixels(file.getvalue()) == 50 * 30
        assert count_pixels(file.getvalue()[:12]) == 0


def test_order(live: Live) -> None:
    """Among small ones each has its own vector, that of a request of its own."""
    small = [encode(GRAIN.rotate(angle), "PNG") for angle in (0, 90, 180)]
    large = [encode(LARGE, "PNG"), encode(LARGE.rotate(180), "JPEG")]
    files = [small[0], large[0], small[1], large[1], small[2], large[0]]
    assert [count_pixels(file) >= LARGE_PIXELS for file in files] == [False, True, False, True, False, True]

    def ask(*files: bytes) -> Array:
        return arrays_of(live.client.post("/extract", json={"inputs": [*map(image, files)], "layers": ["pool"]}))[
            "pool"
        ]

    np.testing.assert_allclose(ask(*files), np.concatenate([ask(file) for file in files]), rtol=1e-5, atol=1e-6)
