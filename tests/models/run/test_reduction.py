"""Reductions against numpy written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.plan.plan import Capture
from layertap.models.plan.requested import Reduction, Sample
from layertap.models.plan.statistics import STATS
from layertap.models.points import Point
from layertap.models.run.reduction import reduce
from layertap.models.spec import Pool, ReplyDType

Array = NDArray[Any]
POINT = Point("layer", 0, (), "output")


@dataclass(frozen=True)
class Case:
    """A info, and how numpy brings a batch of it into (rows, channels, positions), prefix tokens first."""

    info: TensorInfo
    split: Callable[[Array, int], Array]
    rows: int = 3

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape_for(self.rows)


def case(shape: tuple[int, ...], layout: str | None, split: Callable[[Array, int], Array], **more: Any) -> Case:
    return Case(TensorInfo((), shape, "float32", layout=layout, **more), split)


CASES = {
    "N": case((1,), "N", lambda a, n: a.reshape(n, 1, 1)),
    "NC": case((1, 5), "NC", lambda a, n: a[:, :, None]),
    "NC folded": case((4, 5), "NC", lambda a, n: a.reshape(n, 4, 5).transpose(0, 2, 1)),
    "NCL": case((1, 5, 7), "NCL", lambda a, n: a),
    "NCHW": case((1, 5, 4, 3), "NCHW", lambda a, n: a.reshape(n, 5, 12)),
    "NCHW folded": case((2, 5, 4, 3), "NCHW", lambda a, n: np.concatenate([a[::2], a[1::2]], 2).reshape(n, 5, 24)),
    "NHWC": case((1, 4, 3, 5), "NHWC", lambda a, n: a.reshape(n, 12, 5).transpose(0, 2, 1)),
    "NCTHW": case((1, 5, 2, 4, 3), "NCTHW", lambda a, n: a.reshape(n, 5, 24)),
    "NTHWC": case((1, 2, 4, 3, 5), "NTHWC", lambda a, n: a.reshape(n, 24, 5).transpose(0, 2, 1)),
    "NTC": case((1, 6, 5), "NTC", lambda a, n: a.transpose(0, 2, 1)),
    "NTC with prefix": case((1, 6, 5), "NTC", lambda a, n: a.transpose(0, 2, 1), prefix=2),
    "windows": case((4, 6, 5), "NTC", lambda a, n: a.reshape(n, 24, 5).transpose(0, 2, 1)),
    "TNC": case((6, 1, 5), "TNC", lambda a, n: a.transpose(1, 2, 0), row_axis=1),
    "TNC with prefix": case((6, 1, 5), "TNC", lambda a, n: a.transpose(1, 2, 0), row_axis=1, prefix=1),
}
POOLS: dict[str, Callable[[Array, int], Array]] = {
    "mean": lambda a, skip: a[:, :, skip:].mean(-1),
    "mean_all": lambda a, skip: a.mean(-1),
    "max": lambda a, skip: a[:, :, skip:].max(-1),
    "gem": lambda a, skip: (np.clip(a[:, :, skip:], 1e-6, None) ** 3).mean(-1) ** (1 / 3),
}


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    return found.to(dtype)


def as_numpy(value: Tensor) -> Array:
    """In double precision, so that only the code under test rounds."""
    return value.to(torch.float64).numpy()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_pools(name: str, pool: Pool) -> None:
    """Mean, max and GeM of every layout are those of numpy, (N, C), prefix tokens left out but of ``mean_all``."""
    item = CASES[name]
    value = values(item.shape)
    expected = POOLS[pool](item.split(as_numpy(value), item.rows), item.info.prefix)
    found = reduce(RowTensor(value, item.info), Reduction(pool=pool)).values
    assert found.dtype is torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


GRIDS = {
    "NCHW": CASES["NCHW"],
    "NHWC": CASES["NHWC"],
    "patches": case((1, 14, 5), "NTC", lambda a, n: a.transpose(0, 2, 1), prefix=2, grid_size=(4, 3)),
    "TNC": case((13, 1, 5), "TNC", lambda a, n: a.transpose(1, 2, 0), row_axis=1, prefix=1, grid_size=(4, 3)),
}


@pytest.mark.parametrize("grid", [(1, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", GRIDS)
def test_grid(name: str, grid: tuple[int, int]) -> None:
    """Maps and patches of every layout are averaged as by torch; pools and samples are of what that gives."""
    item = GRIDS[name]
    value = values(item.shape)
    maps = torch.from_numpy(item.split(value.numpy(), item.rows)[:, :, item.info.prefix :].copy()).unflatten(-1, (4, 3))
    wanted = torch.nn.functional.adaptive_avg_pool2d(maps, grid)
    entries = 5 * grid[0] * grid[1]
    chosen = np.random.default_rng(7).choice(entries, 4, replace=False)
    for how, expected in (
        (Reduction(grid=grid), wanted),
        (Reduction(grid=grid, channels=(3, 0), pool="max"), wanted[:, [3, 0]].amax((2, 3))),
        (Reduction(grid=grid, pool="flatten", sample=Sample(4, 7)), wanted.flatten(1)[:, chosen]),
    ):
        found = reduce(RowTensor(value, item.info), how).values
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        capture = Capture(POINT, item.info, how)
        assert (capture.shape(item.rows), capture.reduced_info.row_axis) == (tuple(found.shape), 0)


@pytest.mark.parametrize("name", CASES)
def test_places(name: str) -> None:
    """The place of a channel's maximum is counted among all its pixels or tokens, class tokens too, in order."""
    item = CASES[name]
    value = values(item.shape).round()
    by = "channel" if "C" in (item.info.layout or "") else None
    found = reduce(RowTensor(value, item.info), Reduction(stats=("max", "argmax"), by=by)).values.numpy()
    split = item.split(value.numpy(), item.rows)
    expected = np.stack([split.max(-1), split.argmax(-1)], axis=-1)
    np.testing.assert_array_equal(found, expected if by else expected[:, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pool", POOLS)
def test_arithmetic_is_float32_at_least(pool: Pool, dtype: torch.dtype) -> None:
    """A pool of a half-precision tensor is as exact as float32: sums are not rounded on the way."""
    info = TensorInfo((), (1, 2, 64, 64), str(dtype).removeprefix("torch."), layout="NCHW")
    value = (values((2, 2, 64, 64)).abs() + 100).to(dtype)
    expected = POOLS[pool](as_numpy(value).reshape(2, 2, -1), 0)
    np.testing.assert_allclose(reduce(RowTensor(value, info), Reduction(pool=pool)).values.numpy(), expected, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("pool", ["none", "flatten", "max", "mean", "mean_all", "gem"])
def test_whole_numbers(pool: Pool, dtype: torch.dtype) -> None:
    """Integers and booleans stay what they are unless an average is asked for; the plan knows which."""
    info = TensorInfo((), (1, 3, 4), str(dtype).removeprefix("torch."), layout="NCL")
    value = torch.arange(24).reshape(2, 3, 4).to(dtype)
    how = Reduction(pool=pool, dtype="float16")
    found = reduce(RowTensor(value, info), how).values
    averaged = pool in ("mean", "mean_all", "gem")
    assert found.dtype is (torch.float16 if averaged else dtype)
    capture = Capture(POINT, info, how)
    assert capture.dtype == str(found.dtype).removeprefix("torch.")
    assert capture.nbytes(2) == found.numel() * found.itemsize
    if averaged:
        expected = POOLS[pool](as_numpy(value), 0)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3)


@pytest.mark.parametrize("pool", ["mean", "max", "gem", "flatten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_normalize(pool: Pool, dtype: torch.dtype) -> None:
    """``normalize`` gives rows of length one, and zero where a row is zero."""
    info = TensorInfo((), (1, 5, 6), str(dtype).removeprefix("torch."), layout="NCL")
    value = values((3, 5, 6), dtype)
    value[1] = 0
    how = Reduction(pool=pool, normalize=True)
    found = reduce(RowTensor(value, info), how).values
    assert found.dtype is torch.float32
    assert Capture(POINT, info, how).dtype == "float32"
    plain = as_numpy(reduce(RowTensor(value, info), Reduction(pool=pool)).values)
    lengths = np.linalg.norm(plain, axis=-1, keepdims=True)
    np.testing.assert_allclose(found.numpy(), plain / np.maximum(lengths, 1e-12), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "axis"), [("NCHW", 1), ("NHWC", 3), ("NTC", 2), ("TNC", 2), ("NC", 1), ("windows", 2)]
)
def test_channels(name: str, axis: int) -> None:
    """``channels`` keeps those indices in the order given, before any pool."""
    item = CASES[name]
    value = values(item.shape)
    chosen = np.take(value.numpy(), [3, 0, 3], axis)
    found = reduce(RowTensor(value, item.info), Reduction(channels=(3, 0, 3)))
    np.testing.assert_array_equal(found.values.numpy(), chosen)
    pooled = reduce(RowTensor(value, item.info), Reduction(channels=(3, 0, 3), pool="mean")).values
    expected = item.split(value.numpy(), item.rows)[:, [3, 0, 3]].mean(-1)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "axis"), [("NTC with prefix", 1), ("TNC", 0)])
def test_tokens(name: str, axis: int) -> None:
    """``tokens`` keeps those; a pool then takes all that were chosen, the class token too."""
    item = CASES[name]
    value = values(item.shape)
    chosen = np.take(value.numpy(), [5, 0], axis)
    np.testing.assert_array_equal(reduce(RowTensor(value, item.info), Reduction(tokens=(5, 0))).values.numpy(), chosen)
    pooled = reduce(RowTensor(value, item.info), Reduction(tokens=(5, 0), pool="mean")).values
    np.testing.assert_allclose(pooled.numpy(), item.split(chosen, item.rows).mean(-1), rtol=1e-5, atol=1e-6)


@given(st.lists(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_int8_error(rows: list[list[float]]) -> None:
    """An int8 result times its scale is within half a step of the value; the largest of each row is exact."""
    value = torch.tensor(rows)
    found = reduce(RowTensor(value, TensorInfo((), (1, 3), "float32", layout="NC")), Reduction(dtype="int8"))
    assert found.scale is not None
    assert (found.values.dtype, found.scale.dtype, found.scale.shape) == (torch.int8, torch.float32, (len(rows),))
    back = found.values.double() * found.scale.double()[:, None]
    assert bool(((back - value.double()).abs() <= found.scale.double()[:, None] * 0.5001).all())
    assert int(found.values.min()) >= -127


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (2, 0, 3), (0, 0)])
def test_int8_of_nothing(shape: tuple[int, ...]) -> None:
    """An empty tensor is empty as int8 too, with a scale for each index of axis 0."""
    found = reduce(RowTensor(torch.zeros(shape), TensorInfo((), shape, "float32")), Reduction(dtype="int8"))
    assert found.scale is not None
    assert (found.values.dtype, tuple(found.values.shape)) == (torch.int8, shape)
    assert (found.scale > 0).tolist() == [True] * shape[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("pool", ["none", "flatten", "cls", "mean", "max"])
def test_results_own_their_memory(pool: Pool, dtype: ReplyDType) -> None:
    """A result is no view: it takes its own size, is contiguous, and does not change with the model's tensor."""
    info = TensorInfo((), (1, 1, 4), "float32", layout="NTC", prefix=1 if pool == "cls" else 0)
    storage = values((2, 197, 4))
    views = {
        "slice": storage[:, :1],
        "whole": storage[:, :1].clone(),
        "expanded": storage[:, :1, :1].expand(2, 1, 4),
        "transposed": storage[:, :4, :1].transpose(1, 2),
        "one row": storage[:1, :1],
    }
    for name, view in views.items():
        found = reduce(RowTensor(view, info), Reduction(pool=pool, dtype=dtype)).values
        before = found.clone()
        assert found.untyped_storage().nbytes() == found.nbytes, name
        assert found.is_contiguous(), name
        torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).fill_(7)
        assert torch.equal(found, before), name


Array = NDArray[Any]
ALL = Reduction(stats=STATS)
NAMES = ("mean", "std", "min", "max", "l2", "zeros", "nonfinite", *(f"histogram[{place}]" for place in range(16)))
LAST = 16  # columns of the histogram


def count_bins(row: Array) -> list[int]:
    """How many finite drawn lie in each of 16 equal parts of their range, counted one by one."""
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
    return np.array([*found, *count_bins(row)])


def check(found: Tensor, rows: Sequence[Array]) -> None:
    """Statistics of these rows, but for drawn that lie so near the edge of a bin that either is right."""
    assert found.dtype is torch.float32
    assert found.shape == (len(rows), len(NAMES))
    expected = np.stack([truth(row) for row in rows])
    plain, counts = found.numpy()[:, :-LAST], found.numpy()[:, -LAST:]
    np.testing.assert_allclose(plain, expected[:, :-LAST], rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(counts.sum(1), expected[:, -LAST:].sum(1))
    assert np.abs(counts.cumsum(1) - expected[:, -LAST:].cumsum(1)).max() <= 1


def drawn(*shape: int, seed: int = 1) -> Tensor:
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
    value = drawn(*here.shape_for(3))
    found = reduce(RowTensor(value, here), ALL)
    check(found.values, np.split(value.numpy(), 3, axis=here.row_axis or 0))
    capture = Capture(Point("layer", 0, (), "output"), here, ALL)
    assert (capture.shape(3), capture.dtype, capture.reduced_info.row_axis) == ((3, 23), "float32", 0)
    assert capture.nbytes(3) == found.values.nbytes
    assert found.scale is None


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float64", "int64", "int32", "int16", "uint8", "bool"], ids=str
)
def test_dtypes(dtype: str) -> None:
    """Every dtype that a layer may have; sums of half precision are not rounded on the way."""
    value = (drawn(2, 3, 40, 40).abs() * 50).to(getattr(torch, dtype))
    if dtype == "bool":
        value[:, 0] = False
    check(reduce(RowTensor(value, info((1, 3, 40, 40), "NCHW", dtype)), ALL).values, list(value.double().numpy()))


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_bytes_are_predicted(name: str) -> None:
    """What the plan says about a result's shape, dtype and bytes is so, for every pool, dtype and narrowing."""
    item = CASES[name]
    letters = item.info.layout or ""
    value = values(item.shape)
    pools: list[Pool] = ["none", "mean", "max", "gem", "flatten", "cls"]
    dtypes: list[ReplyDType] = ["float32", "float16", "int8"]
    narrow: list[dict[str, Any]] = [{}, *([{"channels": (1, 2)}] if "C" in letters else [])]
    narrow += [{"tokens": (4, 1, 0)}] if "T" in letters and "H" not in letters else []
    for how in (Reduction(pool=p, dtype=d, **n) for p in pools for d in dtypes for n in narrow):
        if how.pool == "cls" and not item.info.prefix:
            continue
        found = reduce(RowTensor(value, item.info), how)
        capture = Capture(POINT, item.info, how)
        assert tuple(found.values.shape) == capture.shape(item.rows), how
        assert f"torch.{capture.dtype}" == str(found.values.dtype), how
        scale = 0 if found.scale is None else found.scale.nbytes
        assert found.values.nbytes + scale == capture.nbytes(item.rows), how


def test_float64_stays() -> None:
    """A deviation that float32 would lose beside the mean is there."""
    value = torch.tensor([[1e8, 1e8 + 1e-3]], dtype=torch.float64)
    found = reduce(RowTensor(value, info((1, 2), "NC", "float64")), Reduction(stats=("std", "histogram"))).values
    assert float(found[0, 0]) == pytest.approx(5e-4, rel=1e-4)
    assert found[0, 1:].tolist() == [1, *[0] * 14, 1]


NAN, INF = float("nan"), float("inf")
SPECIAL: dict[str, tuple[list[float], list[float], list[int]]] = {
    # drawn; mean, std, min, max, l2, zeros, nonfinite; the first and the last bin and what the others hold
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
    np.testing.assert_array_equal(both[1, -LAST:], count_bins(np.array(beside)))


WEIGHTS = TensorInfo((), (1, 4, 7, 7), "float32", layout="NAQK", token_axes=(2, 3))
# A text of every position, one with padding behind it, one with a hole in it and padding on either side.
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0]], dtype=torch.bool)
PARTS: list[dict[str, Any]] = [
    {"heads": (-1, 0)},
    {"queries": (2, 0)},
    {"queries": (-1,)},
    {"heads": (1,), "queries": (0, -2)},
    {"heads": (3, 2), "queries": (1,), "keys": (-1, 1)},
    {"keys": (0,)},
    {"keys": (-3,)},
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts_of_attention(part: dict[str, Any]) -> None:
    """Heads, queries and keys are those named, queries and keys counted among a text's own tokens.

    Of an axis that is not named positions stay, with 0 where a text has none.
    """
    value = values((3, 4, 7, 7))
    length = 6
    how = Reduction(**part)
    found = reduce(RowTensor(value, WEIGHTS, HOLES), how, length).values
    flat = reduce(RowTensor(value, WEIGHTS, HOLES), replace(how, pool="flatten"), length).values
    columns = ("mean", "max", "zeros")
    stats = reduce(RowTensor(value, WEIGHTS, HOLES), replace(how, stats=columns), length).values
    assert found.shape == Capture(POINT, WEIGHTS, how, length).shape(3)
    for place, real in enumerate(HOLES.numpy()):
        own = np.flatnonzero(real)
        queries, keys = (own[list(part[axis])] if axis in part else np.arange(length) for axis in ("queries", "keys"))
        heads = list(part.get("heads", range(4)))
        row = value[place].numpy() * (real[:, None] & real)
        wanted = row[heads][:, queries][:, :, keys]
        np.testing.assert_array_equal(found[place].numpy(), wanted)
        np.testing.assert_array_equal(flat[place].numpy(), wanted.reshape(-1))
        counted = wanted[:, real[queries]][:, :, real[keys]]
        expected = [counted.mean(), counted.max(), (counted == 0).mean()]
        np.testing.assert_allclose(stats[place].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("company", [[], [[1, 1, 1, 1, 1, 1]], [[1, 0, 0, 0, 0, 0]], [[0, 0, 1, 1, 1, 1]]])
def test_tensor_of_no_row(company: list[list[int]]) -> None:
    """What is the same for all rows is cut to the request's length, whoever's padding shares the forward."""
    value = torch.arange(12.0).reshape(1, 6, 2)
    info = TensorInfo((), (1, 6, 2), "float32", row_axis=None, layout=None, token_axes=(1,))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], *company]).bool()
    found = reduce(RowTensor(value, info, mask), Reduction(), 4).values
    np.testing.assert_array_equal(found.numpy(), value[:, :4].numpy())
