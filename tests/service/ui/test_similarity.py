"""The page's arithmetic of similarity against numpy, on what plain hooks see offline of the same model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle import record
from tests.server import Live
from tests.service.digits_reference import copy_digits, random_images
from tests.service.support import Array
from tests.service.ui.conftest import Open, Opened

# Fields come from the test as {height, width, channels, values} with plain lists.
COMPUTE = """async ([name, fields]) => {
  const similarity = await import(new URL("ui/similarity.js", document.baseURI));
  const [a, b] = fields.map(each => ({...each, values: Float32Array.from(each.values)}));
  const kinds = {
    cosine: () => similarity.findCosine(similarity.average(a), similarity.average(b)),
    cosines: () => [...similarity.findCosines(a.values.subarray(0, a.channels), b)],
  };
  return kinds[name]();
}"""


@pytest.fixture(scope="module")
def layers(shown: Live) -> dict[str, Array]:
    """Layers of the embedded model for two rows, as hooks see them offline: (rows, channels, height, width)."""
    rows = torch.from_numpy(random_images(2, 5))
    seen = record(copy_digits(shown), rows)
    return {"block3": seen["block3", 0, (), "output"].numpy()}


@pytest.fixture
def page(shown: Live, open_page: Open) -> Opened:
    return open_page(shown.url)


def compute(page: Opened, name: str, a: Array, b: Array) -> Any:
    return page.page.evaluate(COMPUTE, [name, [_to_field(a), _to_field(b)]])


def _to_field(maps: Array) -> dict[str, Any]:
    channels, height, width = maps.shape
    values = np.moveaxis(maps, 0, -1).astype(np.float32).reshape(-1).tolist()
    return {"height": height, "width": width, "channels": channels, "values": values}


def flat(maps: Array) -> Array:
    """(places, channels), in float64."""
    return np.moveaxis(maps, 0, -1).reshape(-1, len(maps)).astype(np.float64)


def test_cosines(page: Opened, layers: dict[str, Array]) -> None:
    """The cosine of mean vectors, and of one place to every place of the other picture."""
    a, b = layers["block3"]
    x, y = flat(a), flat(b)
    between = x.mean(0) @ y.mean(0) / np.linalg.norm(x.mean(0)) / np.linalg.norm(y.mean(0))
    assert compute(page, "cosine", a, b) == pytest.approx(between, abs=1e-6)
    each = y @ x[0] / np.linalg.norm(y, axis=1) / np.linalg.norm(x[0])
    np.testing.assert_allclose(compute(page, "cosines", a, b), each, atol=1e-6)


def test_zero_vector(page: Opened) -> None:
    """What is all zeros has no angle to anything."""
    nothing, ones = np.zeros((2, 1, 2)), np.ones((2, 1, 2))
    assert compute(page, "cosines", nothing, ones) == pytest.approx([np.nan, np.nan], nan_ok=True)
