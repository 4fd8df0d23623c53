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

WHOLE = [0, 0, 1, 1]
# Fields come from the test as {height, width, channels, values} with plain lists.
COMPUTE = """async ([name, fields, seen]) => {
  const similarity = await import(new URL("ui/similarity.js", document.baseURI));
  const [a, b] = fields.map(each => ({...each, values: Float32Array.from(each.values)}));
  const align = () => {
    const shared = similarity.findShared(a, b, ...seen);
    const points = [a, b].map((each, at) => similarity.resample(each, shared.rows, shared.columns, shared.boxes[at]));
    const count = shared.rows * shared.columns;
    return {count, points: points.map(each => [...each]), ...similarity.findAlignment(...points, count)};
  };
  const kinds = {
    align,
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
    return {name: seen[name, 0, (), "output"].numpy() for name in ("block1", "block2", "block3")}


@pytest.fixture
def page(shown: Live, open_page: Open) -> Opened:
    return open_page(shown.url)


def compute(page: Opened, name: str, a: Array, b: Array, seen_a: object = WHOLE, seen_b: object = WHOLE) -> Any:
    fields = [_to_field(each) for each in (a, b)]
    return page.page.evaluate(COMPUTE, [name, fields, [seen_a, seen_b]])


def _to_field(maps: Array) -> dict[str, Any]:
    channels, height, width = maps.shape
    values = np.moveaxis(maps, 0, -1).astype(np.float32).reshape(-1).tolist()
    return {"height": height, "width": width, "channels": channels, "values": values}


def flat(maps: Array) -> Array:
    """(places, channels), in float64."""
    return np.moveaxis(maps, 0, -1).reshape(-1, len(maps)).astype(np.float64)


def shrink(maps: Array, factor: int) -> Array:
    """The means of squares of so many places a side."""
    channels, height, width = maps.shape
    squares = maps.astype(np.float64).reshape(channels, height // factor, factor, width // factor, factor)
    return squares.mean((2, 4))


def align(x: Array, y: Array) -> float:
    """Linear CKA as Kornblith et al. write it, by the layers' covariances."""
    x, y = x - x.mean(0), y - y.mean(0)
    both = np.linalg.norm(y.T @ x) ** 2
    return float(both / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y))


def estimate(k: Array, l: Array) -> float:  # noqa: E741
    """The unbiased estimate of HSIC, as Song et al. write it."""
    count = len(k)
    k, l = k * (1 - np.eye(count)), l * (1 - np.eye(count))  # noqa: E741
    one = np.ones(count)
    terms = (
        np.trace(k @ l)
        + (one @ k @ one) * (one @ l @ one) / (count - 1) / (count - 2)
        - 2 / (count - 2) * (one @ k @ l @ one)
    )
    return float(terms / count / (count - 3))


def align_without_bias(x: Array, y: Array) -> float:
    k, l = x @ x.T, y @ y.T  # noqa: E741
    return estimate(k, l) / np.sqrt(estimate(k, k) * estimate(l, l))


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


def test_alignment(page: Opened, layers: dict[str, Array]) -> None:
    """CKA of two layers of one picture, of different widths, over the coarser one's places; biased and not."""
    a, b = layers["block1"][0], layers["block3"][0]
    x, y = flat(shrink(a, 4)), flat(b)
    answer = compute(page, "align", a, b)
    assert answer["count"] == 64
    np.testing.assert_allclose(np.array(answer["points"][0]).reshape(64, -1), x, atol=1e-5)
    assert answer["cka"] == pytest.approx(align(x, y), rel=1e-5)
    assert answer["debiased"] == pytest.approx(align_without_bias(x, y), rel=1e-4)


def test_rotated(page: Opened, layers: dict[str, Array]) -> None:
    """Channels that are turned, scaled and moved together are the same to CKA."""
    maps = layers["block2"][0]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(len(maps), len(maps))))[0]
    turned = 3 * np.einsum("dc,chw->dhw", turn, maps) + 1
    answer = compute(page, "align", maps, turned)
    assert answer["count"] == 256
    assert answer["cka"] == pytest.approx(1, abs=1e-4)
    assert answer["debiased"] == pytest.approx(1, abs=1e-4)


def test_noise(page: Opened) -> None:
    """Of unrelated noise with more channels than places CKA is high, and the debiased one near zero."""
    a, b = np.random.default_rng(1).normal(size=(2, 400, 6, 6))
    answer = compute(page, "align", a, b)
    assert answer["cka"] > 0.7
    assert abs(answer["debiased"]) < 0.2


def test_crops(page: Opened) -> None:
    """Of two crops of one picture the part that both have is compared: each cell the mean of what it covers."""
    whole, middle = np.random.default_rng(2).normal(size=(2, 3, 12, 12))
    answer = compute(page, "align", whole, middle, WHOLE, [0.25, 0.25, 0.5, 0.5])
    assert answer["count"] == 36
    np.testing.assert_allclose(np.array(answer["points"][0]).reshape(36, 3), flat(whole[:, 3:9, 3:9]), atol=1e-6)
    np.testing.assert_allclose(np.array(answer["points"][1]).reshape(36, 3), flat(shrink(middle, 2)), atol=1e-6)


def test_broken_cells(page: Opened) -> None:
    """Places that lie across two cells count in each by what they have of it."""
    fine, coarse = np.random.default_rng(3).normal(size=(2, 9, 9)), np.random.default_rng(4).normal(size=(2, 6, 6))
    answer = compute(page, "align", fine, coarse)
    doubled = fine.repeat(2, 1).repeat(2, 2)  # 18 a side, of which three make a cell
    np.testing.assert_allclose(np.array(answer["points"][0]).reshape(36, 2), flat(shrink(doubled, 3)), atol=1e-6)
