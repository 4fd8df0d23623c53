"""Statistics over HTTP: computed from the values that another request gets, in every format, told by the receipts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.server import Live
from tests.service.support import Array, Json, arrays_of, image, picture, problem, tensor

NAMES = ["mean", "std", "min", "max", "l2", "zeros", "nonfinite"]
BINS = [f"histogram[{place}]" for place in range(16)]
INPUTS = [image(picture(seed)) for seed in range(3)]


def extract(live: Live, *layers: Any, **body: Any) -> Any:
    return live.client.post("/extract", json={"layers": list(layers), "inputs": INPUTS, **body})


def by_hand(values: Array) -> Array:
    """All but the histogram, of each row, in double precision."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    columns = [flat.mean(1), flat.std(1), flat.min(1), flat.max(1), np.sqrt((flat**2).sum(1)), (flat == 0).mean(1)]
    return np.stack([*columns, (~np.isfinite(flat)).sum(1)], axis=1)


def test_by_channel(live: Live) -> None:
    """Statistics of each channel are those of its values, as a small tensor for each row."""
    layer = "block2"
    raw = arrays_of(extract(live, layer))[layer]
    reply = extract(live, {"layer": layer, "stats": True, "by": "channel"})
    found = arrays_of(reply)[layer]
    rows, channels = raw.shape[:2]
    assert (found.shape, found.dtype) == ((rows, channels, 23), np.float32)
    expected = by_hand(raw.reshape(rows * channels, -1)).reshape(rows, channels, 7)
    np.testing.assert_allclose(found[..., :7], expected, rtol=1e-5, atol=1e-6)
    receipt = reply.json()["receipts"][layer]
    assert (receipt["by"], receipt["stats"], receipt["pool"]) == ("channel", [*NAMES, *BINS], "none")
    assert receipt["captured"] == list(raw.shape)
    some = {"layer": layer, "stats": ["max", "mean"], "by": "channel", "channels": [5, 2]}
    narrowed = arrays_of(extract(live, some))[layer]
    assert np.array_equal(narrowed, found[:, [5, 2]][..., [3, 0]])


@pytest.mark.parametrize("by", [None, "channel"])
def test_over_inputs(live: Live, by: str | None) -> None:
    """Over all inputs statistics are those of all their values together, however many forwards they came from."""
    many = [image(picture(seed)) for seed in range(40)]
    raw = arrays_of(extract(live, "block1", inputs=many))["block1"]
    entry = {"layer": "block1", "stats": NAMES, "over": "inputs", **({"by": by} if by else {})}
    reply = extract(live, entry, inputs=many)
    found = arrays_of(reply)["block1"]
    groups = raw.swapaxes(0, 1).reshape(raw.shape[1], -1) if by else raw.reshape(1, -1)
    expected = by_hand(groups) if by else by_hand(groups)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    body = reply.json()
    receipt = body["receipts"]["block1"]
    assert (body["rows"], receipt["over"], receipt["row_axis"]) == (40, "inputs", None)
    dry = live.client.post("/extract?dry_run=true", json={"layers": [entry], "inputs": many}).json()
    assert dry["features"]["block1"]["shape"] == list(found.shape)
    assert dry["features"]["block1"]["bytes"] == found.nbytes
    assert dry["fingerprint"] == body["fingerprint"]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"by": "channel"}, "are of statistics"),
        ({"stats": True, "over": "inputs"}, "'histogram'"),
        ({"stats": ["std"], "over": "inputs"}, "made of their means"),
    ],
)
def test_what_makes_no_sense(live: Live, entry: Json, says: str) -> None:
    """What can't be had is refused, and what to type instead is said."""
    assert says in str(problem(extract(live, {"layer": "block1", **entry}), 422))


def test_edges(live: Live) -> None:
    """Between edges a histogram counts as numpy does, of each input and of all; so do all values."""
    raw = arrays_of(extract(live, "block2"))["block2"].astype(np.float64)
    edges = [-0.5, 0.0, 0.25, 2.0]
    entry: Json = {"layer": "block2", "stats": ["count", "histogram"], "edges": edges, "by": "channel"}
    reply = extract(live, entry)
    found = arrays_of(reply)["block2"]
    assert (found[..., 0] == raw[0, 0].size).all()
    expected = np.array([[np.histogram(channel, edges)[0] for channel in row] for row in raw])
    assert (expected.sum(-1) < raw[0, 0].size).any()
    np.testing.assert_array_equal(found[..., 1:], expected)
    receipt = reply.json()["receipts"]["block2"]
    assert (receipt["stats"], receipt["edges"]) == (["count", *BINS[:3]], edges)
    mixed = [*INPUTS, image(picture(9))]
    over = arrays_of(extract(live, {**entry, "over": "inputs"}, inputs=mixed))["block2"]
    np.testing.assert_array_equal(over, arrays_of(extract(live, entry, inputs=mixed))["block2"].sum(0))
    other = extract(live, {**entry, "edges": [-1, 1]}).json()["receipts"]["block2"]["fingerprint"]
    assert other != receipt["fingerprint"]
    for wrong in ({"edges": [1, 1]}, {"edges": [0, 1e39]}, {"edges": [1e39, 1e39]}, {"stats": ["mean"]}):
        assert extract(live, {**entry, **wrong}).status_code == 422


def test_grid_and_sample(live: Live) -> None:
    """Averages of a small grid and units chosen at random are what torch and numpy make of the layer's values."""
    layer = "block2"
    raw = arrays_of(extract(live, layer))[layer]
    grid = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(raw), (2, 3)).numpy()
    flat, normed = raw.reshape(len(raw), -1), grid.reshape(len(raw), -1)
    normed = normed / np.linalg.norm(normed, axis=1, keepdims=True)
    mean = raw.mean((2, 3))
    chosen = {size: np.random.default_rng(5).choice(size, 20, replace=False) for size in (flat.shape[1], mean.shape[1])}
    sample = {"units": 20, "seed": 5}
    cases: dict[str, tuple[Json, Array]] = {
        "grid": ({"grid": [2, 3]}, grid),
        "normed": ({"grid": [2, 3], "pool": "flatten", "normalize": True}, normed),
        "units": ({"sample": sample}, flat[:, chosen[flat.shape[1]]]),
        "channels": ({"sample": sample, "pool": "mean"}, mean[:, chosen[mean.shape[1]]]),
    }
    reply = extract(live, *({"layer": layer, "as": name, **how} for name, (how, _) in cases.items()))
    found, receipts = arrays_of(reply), reply.json()["receipts"]
    for name, (_, expected) in cases.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert (receipts["grid"]["grid"], receipts["units"]["sample"]) == ([2, 3], sample)
    assert len({receipt["fingerprint"] for receipt in receipts.values()}) == len(cases)
    entry = {"layer": layer, "grid": [2, 3], "pool": "max"}
    large = tensor(np.zeros((3, 40, 48), np.float32))  # of another size: still one array
    assert arrays_of(extract(live, entry, inputs=[INPUTS[0], large]))[layer].shape == (2, raw.shape[1])
    for wrong, says in (
        ({"grid": [99, 1]}, "'grid' is larger"),
        ({"sample": {"units": 10**6}}, "and there are"),
        ({"grid": [1, 1], "stats": True}, "not of statistics"),
        ({"grid": [0, 1]}, "greater than or equal to 1"),
        ({"layer": "head", "grid": [1, 1]}, "no rows and columns"),
    ):
        assert says in str(problem(extract(live, {"layer": layer, **wrong}), 422))
