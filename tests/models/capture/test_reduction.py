"""Reductions against numpy written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.capture.reduction import reduce
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.selection.hook_points import HookPoint, Pool, Reduction, ReplyDType
from layertap.models.selection.plan import Capture

Array = NDArray[Any]
POINT = HookPoint("layer", 0, (), "output")


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
    found: Array = value.to(torch.float64).numpy()
    return found


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


@pytest.mark.parametrize("name", CASES)
def test_flatten(name: str) -> None:
    """``flatten`` keeps every number of a row, in the order in which the row's own tensor holds them."""
    item = CASES[name]
    value = values(item.shape)
    rows = np.split(value.numpy(), item.rows, axis=item.info.row_axis or 0)
    found = reduce(RowTensor(value, item.info), Reduction(pool="flatten")).values
    np.testing.assert_array_equal(found.numpy(), np.stack([row.reshape(-1) for row in rows]))


@pytest.mark.parametrize("name", ["NTC with prefix", "TNC with prefix"])
def test_class_token(name: str) -> None:
    """``cls`` is the first token."""
    item = CASES[name]
    value = values(item.shape)
    found = reduce(RowTensor(value, item.info), Reduction(pool="cls")).values
    np.testing.assert_array_equal(found.numpy(), item.split(value.numpy(), item.rows)[:, :, 0])


@pytest.mark.parametrize("name", ["NTC with prefix", "TNC with prefix"])
def test_last_token(name: str) -> None:
    """``last`` is the last token, and a negative index counts from there."""
    item = CASES[name]
    value = values(item.shape)
    expected = item.split(value.numpy(), item.rows)[:, :, -1]
    np.testing.assert_array_equal(reduce(RowTensor(value, item.info), Reduction(pool="last")).values.numpy(), expected)
    named = reduce(RowTensor(value, item.info), Reduction(tokens=(-1,), pool="mean")).values
    np.testing.assert_allclose(named.numpy(), expected, rtol=1e-6)


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


@pytest.mark.parametrize("name", ["NTC", "NTC with prefix", "TNC", "TNC with prefix"])
def test_tokens(name: str) -> None:
    """``tokens`` keeps those; a pool then takes all that were chosen, the class token too."""
    item = CASES[name]
    value = values(item.shape)
    axis = 0 if name.startswith("T") else 1
    chosen = np.take(value.numpy(), [5, 0], axis)
    np.testing.assert_array_equal(reduce(RowTensor(value, item.info), Reduction(tokens=(5, 0))).values.numpy(), chosen)
    pooled = reduce(RowTensor(value, item.info), Reduction(tokens=(5, 0), pool="mean")).values
    np.testing.assert_allclose(pooled.numpy(), item.split(chosen, item.rows).mean(-1), rtol=1e-5, atol=1e-6)


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


def test_a_tensor_without_axes() -> None:
    """A scalar comes through, in every reply dtype, and takes the bytes that were predicted."""
    info = TensorInfo((), (), "float32", row_axis=None)
    dtypes: list[ReplyDType] = ["float32", "float16", "int8"]
    for dtype in dtypes:
        found = reduce(RowTensor(torch.tensor(2.5), info), Reduction(dtype=dtype))
        assert found.values.shape == ()
        size = found.values.nbytes + (0 if found.scale is None else found.scale.nbytes)
        assert Capture(POINT, info, Reduction(dtype=dtype)).nbytes(4) == size


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


def test_int8_of_zeros() -> None:
    """A row of zeros is zeros, and its scale a normal number, also where denormal ones count as zero."""
    found = reduce(
        RowTensor(torch.zeros(2, 3), TensorInfo((), (1, 3), "float32", layout="NC")), Reduction(dtype="int8")
    )
    assert found.scale is not None
    assert float(found.scale.min()) >= torch.finfo(torch.float32).tiny
    assert found.values.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (2, 0, 3), (0, 0)])
def test_int8_of_nothing(shape: tuple[int, ...]) -> None:
    """An empty tensor is empty as int8 too, with a scale for each index of axis 0."""
    found = reduce(RowTensor(torch.zeros(shape), TensorInfo((), shape, "float32")), Reduction(dtype="int8"))
    assert found.scale is not None
    assert (found.values.dtype, tuple(found.values.shape)) == (torch.int8, shape)
    assert (found.scale > 0).tolist() == [True] * shape[0]


def test_int8_scales_are_of_each_row() -> None:
    """One row's scale does not depend on another's size."""
    info = TensorInfo((), (1, 2, 3), "float32", layout="NTC")
    value = values((3, 2, 3))
    alone = reduce(RowTensor(value[:1], info), Reduction(dtype="int8"))
    value[1] *= 1e6
    together = reduce(RowTensor(value, info), Reduction(dtype="int8"))
    assert alone.scale is not None
    assert together.scale is not None
    assert torch.equal(alone.values[0], together.values[0])
    assert alone.scale[0] == together.scale[0]


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


def test_channels_last_memory_comes_out_in_c_order() -> None:
    """The order of a tensor's memory has no bearing on a result."""
    info = TensorInfo((), (1, 3, 4, 5), "float32", layout="NCHW")
    value = values((2, 3, 4, 5))
    found = reduce(RowTensor(value.contiguous(memory_format=torch.channels_last), info), Reduction()).values
    assert found.stride() == (60, 20, 5, 1)
    assert torch.equal(found, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_becomes_the_reply_dtype(dtype: torch.dtype) -> None:
    """A model's own dtype never reaches the reply: bfloat16 has no numpy type."""
    info = TensorInfo((), (1, 3), str(dtype).removeprefix("torch."), layout="NC")
    value = values((2, 3), dtype)
    for reply, wanted in (("float32", torch.float32), ("float16", torch.float16)):
        found = reduce(RowTensor(value, info), Reduction(dtype=reply)).values  # type: ignore[arg-type]
        assert found.dtype is wanted
        assert torch.equal(found, value.to(wanted))
        assert found.numpy().dtype.name == reply


PADDED = {name: CASES[name] for name in ("NTC", "NTC with prefix", "TNC", "TNC with prefix")}
REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    "how", [*({"pool": pool} for pool in ("mean", "mean_all", "max", "gem")), {"stats": ("mean", "std", "max")}]
)
@pytest.mark.parametrize("name", PADDED)
def test_padding_stays_out(name: str, how: dict[str, Any]) -> None:
    """A row is pooled as if it had come without the tokens that pad it, whatever these hold."""
    item = PADDED[name]
    value = values(item.shape).abs()
    rows, tokens = item.info.row_axis or 0, (item.info.layout or "").index("T")
    spoiled = value.clone().movedim((rows, tokens), (0, 1))
    spoiled[~REAL] = torch.nan
    spoiled = spoiled.movedim((0, 1), (rows, tokens))
    info = replace(item.info, token_axes=(tokens,))
    found = reduce(RowTensor(spoiled, info, REAL), Reduction(**how)).values
    for place, places in enumerate(REAL):
        alone = value.select(rows, place).numpy()[places.numpy()]  # (tokens, channels)
        kept = alone if "stats" in how or how["pool"] == "mean_all" else alone[item.info.prefix :]
        wanted = by_numpy(kept.astype(np.float64), how)
        np.testing.assert_allclose(found[place].numpy(), wanted, rtol=1e-5)


def by_numpy(kept: Array, how: dict[str, Any]) -> Array:
    if "stats" in how:
        return np.array([kept.mean(), kept.std(), kept.max()])
    if how["pool"] == "gem":
        return (kept.clip(1e-6) ** 3).mean(0) ** (1 / 3)
    found: Array = kept.max(0) if how["pool"] == "max" else kept.mean(0)
    return found


def test_padding_is_left_in_elsewhere() -> None:
    """Nothing is taken out of what is no sequence of these tokens, or is not made of all of them."""
    info, value = CASES["NTC"].info, values((3, 6, 5))
    for how in (Reduction(), Reduction(pool="flatten"), Reduction(pool="mean", tokens=(1, 5))):
        assert torch.equal(reduce(RowTensor(value, info, REAL), how).values, reduce(RowTensor(value, info), how).values)
    grid = CASES["NCHW"].info
    other = values((3, 5, 4, 3))
    mean = Reduction(pool="mean")
    assert torch.equal(reduce(RowTensor(other, grid, REAL), mean).values, reduce(RowTensor(other, grid), mean).values)
    longer = TensorInfo((), (1, 7, 5), "float32", layout="NTC")
    more = values((3, 7, 5))
    assert torch.equal(reduce(RowTensor(more, longer, REAL), mean).values, reduce(RowTensor(more, longer), mean).values)


@pytest.mark.parametrize("name", PADDED)
def test_tokens_from_the_end(name: str) -> None:
    """Of rows of several lengths each gives its own last tokens, wherever a tensor has its rows."""
    item = PADDED[name]
    value = values(item.shape)
    rows, tokens = item.info.row_axis or 0, (item.info.layout or "").index("T")
    info = replace(item.info, token_axes=(tokens,))
    found = reduce(RowTensor(value, info, REAL), Reduction(tokens=(-1, -3)), 6).values
    assert found.shape == Capture(POINT, info, Reduction(tokens=(-1, -3))).shape(3)
    for place, count in enumerate(REAL.sum(1).tolist()):
        wanted = value.select(rows, place)[[count - 1, count - 3]]
        assert torch.equal(found.movedim((rows, tokens), (0, 1))[place], wanted)


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
