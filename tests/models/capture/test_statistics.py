"""Statistics of rows against numpy, written by hand: every layout, every dtype, NaN, infinities, rows that are flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.capture.reduction import reduce
from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import HookPoint, Reduction, Selector, format_path
from layertap.models.selection.plan import Capture
from layertap.models.selection.selectors import parse_selector
from layertap.models.selection.statistics import STATS, list_columns
from tests.conftest import Loader
from tests.models.extraction import extract_plan, list_tensors
from tests.nets import batch
from tests.oracle import record

Array = NDArray[Any]
ALL = Reduction(stats=STATS)
NAMES = ("mean", "std", "min", "max", "l2", "zeros", "nonfinite", *(f"histogram[{place}]" for place in range(16)))
LAST = 16  # columns of the histogram


def bins(row: Array) -> list[int]:
    """How many finite values lie in each of 16 equal parts of their range, counted one by one."""
    finite = [float(value) for value in row if np.isfinite(value)]
    counts = [0] * 16
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    for value in finite:
        place = int((value - low) / (high - low) * 16) if high > low else 0
        counts[min(place, 15)] += 1
    return counts


def truth(row: Array) -> Array:
    """All statistics of one row, in double precision."""
    row = row.astype(np.float64).reshape(-1)
    count = len(row)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = row.sum() / count
        found = [
            mean,
            np.sqrt(((row - mean) ** 2).sum() / count),
            row.min(),
            row.max(),
            np.sqrt((row**2).sum()),
            np.count_nonzero(row == 0) / count,
            count - np.count_nonzero(np.abs(row) < np.inf),
        ]
    return np.array([*found, *bins(row)])


def check(found: Tensor, rows: Sequence[Array]) -> None:
    """Statistics of these rows, but for values that lie so near the edge of a bin that either is right."""
    assert found.dtype is torch.float32
    assert found.shape == (len(rows), len(NAMES))
    expected = np.stack([truth(row) for row in rows])
    plain, counts = found.numpy()[:, :-LAST], found.numpy()[:, -LAST:]
    np.testing.assert_allclose(plain, expected[:, :-LAST], rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(counts.sum(1), expected[:, -LAST:].sum(1))
    assert np.abs(counts.cumsum(1) - expected[:, -LAST:].cumsum(1)).max() <= 1


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def info(shape: tuple[int, ...], layout: str | None = None, dtype: str = "float32", **more: Any) -> TensorInfo:
    return TensorInfo((), shape, dtype, layout=layout, **more)


LEAVES = {
    "N": info((1,), "N"),
    "NC": info((1, 5), "NC"),
    "NC folded": info((4, 5), "NC"),
    "NCHW": info((1, 5, 4, 3), "NCHW"),
    "NHWC": info((1, 4, 3, 5), "NHWC"),
    "NTC": info((1, 6, 5), "NTC"),
    "NTC with prefix": info((1, 6, 5), "NTC", prefix=2),
    "windows": info((4, 6, 5), "NTC"),
    "TNC": info((6, 1, 5), "TNC", row_axis=1),
    "unknown axes": info((1, 3, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_layouts(name: str) -> None:
    """Whatever the layout, a row's statistics are over all that belongs to it; the plan knows shape and bytes."""
    here = LEAVES[name]
    value = values(*here.shape_for(3))
    found = reduce(RowTensor(value, here), ALL)
    check(found.values, np.split(value.numpy(), 3, axis=here.row_axis or 0))
    capture = Capture(HookPoint("layer", 0, (), "output"), here, ALL)
    assert (capture.shape(3), capture.dtype, capture.reduced_info.row_axis) == ((3, 23), "float32", 0)
    assert capture.nbytes(3) == found.values.nbytes
    assert found.scale is None


@pytest.mark.parametrize(
    "stats", [("mean",), ("histogram",), ("max", "min"), ("nonfinite", "histogram", "mean"), STATS[::-1]]
)
def test_subsets(stats: tuple[str, ...]) -> None:
    """Those that were asked for, in the order given, with a name for each column."""
    here, value = LEAVES["NCHW"], values(2, 5, 4, 3)
    every = dict(zip(NAMES, reduce(RowTensor(value, here), ALL).values.unbind(1), strict=True))
    assert list_columns(STATS) == NAMES
    found = reduce(RowTensor(value, here), Reduction(stats=stats)).values
    assert found.shape == (2, len(list_columns(stats)))
    for name, column in zip(list_columns(stats), found.unbind(1), strict=True):
        assert torch.equal(column, every[name]), name
    assert list(dict.fromkeys(name.partition("[")[0] for name in list_columns(stats))) == list(stats)


@pytest.mark.parametrize("how", [{"channels": (3, 0)}, {"tokens": (5, 1)}, {"channels": (1,), "tokens": (2,)}], ids=str)
def test_narrowed(how: dict[str, Any]) -> None:
    """Statistics are of the channels and tokens that were chosen."""
    value = values(3, 6, 5)
    chosen = value.numpy()[:, how.get("tokens", range(6))][:, :, how.get("channels", range(5))]
    check(reduce(RowTensor(value, LEAVES["NTC with prefix"]), Reduction(**how, stats=STATS)).values, list(chosen))


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float64", "int64", "int32", "int16", "uint8", "bool"], ids=str
)
def test_dtypes(dtype: str) -> None:
    """Every dtype that a layer may have; sums of half precision are not rounded on the way."""
    value = (values(2, 3, 40, 40).abs() * 50).to(getattr(torch, dtype))
    if dtype == "bool":
        value[:, 0] = False
    check(reduce(RowTensor(value, info((1, 3, 40, 40), "NCHW", dtype)), ALL).values, list(value.double().numpy()))


NAN, INF = float("nan"), float("inf")
SPECIAL: dict[str, tuple[list[float], list[float], list[int]]] = {
    # values; mean, std, min, max, l2, zeros, nonfinite; the first and the last bin and what the others hold
    "NaN": ([1.0, NAN, 3.0, 0.0], [NAN, NAN, NAN, NAN, NAN, 0.25, 1], [1, 1, 1]),
    "infinity": ([1.0, INF, 3.0, 0.0], [INF, NAN, 0.0, INF, INF, 0.25, 1], [1, 1, 1]),
    "none finite": ([NAN, INF, -INF, NAN], [NAN, NAN, NAN, NAN, NAN, 0.0, 4], [0, 0, 0]),
    "all equal": ([5.0] * 4, [5.0, 0.0, 5.0, 5.0, 10.0, 0.0, 0], [4, 0, 0]),
    "all zero": ([0.0, -0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0], [4, 0, 0]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str) -> None:
    """NaN and infinities show in what they are part of; the histogram leaves them out."""
    row, plain, (first, last, between) = SPECIAL[name]
    beside = [1.0, 2.0, 3.0, 4.0]
    both = reduce(RowTensor(torch.tensor([row, beside]), LEAVES["NC"]), ALL).values.numpy()
    np.testing.assert_allclose(both[0, :-LAST], np.array(plain, np.float32), rtol=1e-6)
    counts = both[0, -LAST:]
    assert (counts[0], counts[-1], counts[1:-1].sum()) == (first, last, between)
    np.testing.assert_array_equal(both[1, -LAST:], bins(np.array(beside)))


def test_edges_of_bins() -> None:
    """A value at an edge belongs to the bin above it, the greatest to the last."""
    found = reduce(RowTensor(torch.arange(17.0)[None], info((1, 17), "NC")), Reduction(stats=("histogram",))).values
    assert found[0].tolist() == [*[1] * 15, 2]


def stats_of(text: str) -> Selector:
    parsed = parse_selector(text)
    return Selector(**{**vars(parsed), "reduction": ALL})


@pytest.mark.parametrize("name", ["resnet", "swin", "TimeFirst", "Structured"])
def test_models(load_net: Loader, name: str) -> None:
    """Of every layer of real models: the statistics of what an independent hook copies."""
    model = load_net(name)
    rows = batch(model.inputs, 3)
    plan = make_plan(everywhere(model.catalog), model.catalog)
    found = extract_plan(model, rows, plan, model.catalog, 8)
    seen = record(model.module, *rows.values())
    assert len(plan.results) >= 2
    for capture, reduced in found.items():
        point, here = capture.point, capture.info
        value = seen[point.layer, point.call, point.path, point.site].double().numpy()
        check(reduced.values, np.split(value, 3, axis=here.row_axis or 0))


def everywhere(catalog: Catalog) -> list[Selector]:
    """One for each tensor of a model that has rows of its own."""
    return [
        stats_of(f"{point.layer}#{point.call}{format_path(point.path)}:{point.site}")
        for point, info in list_tensors(catalog, "output", "input")
        if info.row_axis is not None and not info.crosses_rows and info.dtype != "complex64"
    ]
