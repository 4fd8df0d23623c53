"""Arrow streams, as those who read them see them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from io import BytesIO
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.models.spec import ModelSpec
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Features
from layertap.service.formats.reply_format import EncodeOptions
from layertap.service.formats.table import FORMATS
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.formats.test_encoders import features, receipt
from tests.service.support import (
    ROW,
    Array,
    Json,
    arrays_of,
    columns_of,
    configured,
    image,
    metadata,
    picture,
    problem,
    tensor,
)

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
SHAPE = (16, 32, 32)  # of a row of block1
LAYERS = ["block1", "pool", "head", {"layer": "block2", "stats": ["mean", "max"], "as": "statistics"}]
BODY: Json = {"layers": LAYERS, "inputs": [image(picture(seed)) for seed in range(3)]}


def ask(live: Live, body: Json = BODY, form: str = "arrow") -> Any:
    """A reply in a format."""
    reply = live.client.post("/extract", json=body, params={"format": form})
    assert reply.status_code == 200, reply.text
    return reply


def read(data: bytes) -> pa.Table:
    """A stream as pyarrow reads it."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_columns(live: Live, dtype: str) -> None:
    """Each result is a column with a tensor for each input: the numbers of every other format."""
    reply = ask(live, BODY | {"dtype": dtype})
    assert reply.headers["content-type"] == MEDIA_TYPE
    table = read(reply.content)
    assert table.num_rows == 3
    assert table.column_names == ["block1", "pool", "head", "statistics"]
    assert table.schema.field("block1").type.shape == list(SHAPE)
    assert table.schema.field("block1").type.value_type == pa.from_numpy_dtype(dtype)
    expected = arrays_of(ask(live, BODY | {"dtype": dtype}, "npz"))
    for name, array in columns_of(table).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


def test_accept(live: Live) -> None:
    """The media type asks for it too, and nobody gets it who accepts anything."""
    reply = live.client.post("/extract", json=BODY, headers={"accept": f"{MEDIA_TYPE}, application/json;q=0.5"})
    assert reply.headers["content-type"] == MEDIA_TYPE
    assert read(reply.content).equals(read(ask(live).content))
    assert live.client.post("/extract", json=BODY, headers={"accept": "*/*"}).headers["content-type"] != MEDIA_TYPE


def test_metadata(live: Live) -> None:
    """The schema says what safetensors' metadata does: model, fingerprint, receipts, what was left out and why."""
    body = BODY | {"inputs": [*BODY["inputs"], image(b"no picture")], "on_error": "skip"}
    reply = ask(live, body)
    found = {key.decode(): value.decode() for key, value in read(reply.content).schema.metadata.items()}
    assert found == metadata(ask(live, body, "safetensors"))
    assert (found["rows"], found["skipped"]) == ("3", "3")
    assert found["fingerprint"] == reply.headers["x-layertap-fingerprint"]
    assert json.loads(found["receipts"])["block1"]["module"] == "Sequential"
    assert json.loads(found["errors"])[0]["input"] == 3
    assert reply.headers["x-layertap-skipped"] == "3"


def test_scales(live: Live) -> None:
    """The scales of int8 are a column of numbers; with them a query has the values back."""
    body = BODY | {"layers": ["head"], "dtype": "int8"}
    frame, expected = read(ask(live, body).content), arrays_of(ask(live, body, "npz"))
    assert frame.schema.field("head.scale").type == pa.float32()
    np.testing.assert_array_equal(columns_of(frame)["head.scale"], expected["head.scale"], strict=True)
    found = duckdb.sql('select list_transform("head", lambda x: x * "head.scale") from frame').fetchall()
    np.testing.assert_allclose([row[0] for row in found], expected["head"] * expected["head.scale"][:, None], 1e-6)


def test_pandas(live: Live) -> None:
    """Pandas gets an array for each cell."""
    frame = read(ask(live).content).to_pandas()
    expected = arrays_of(ask(live, form="npz"))
    assert list(frame.columns) == list(expected)
    np.testing.assert_array_equal(np.stack(frame["head"]), expected["head"])
    np.testing.assert_array_equal(np.stack(frame["block1"]).reshape(3, *SHAPE), expected["block1"])


def test_polars(live: Live) -> None:
    """Polars reads the stream by itself; its arrays are those of the storage, flat."""
    frame = polars.read_ipc_stream(BytesIO(ask(live).content))
    expected = arrays_of(ask(live, form="npz"))
    for name in frame.columns:
        np.testing.assert_array_equal(frame[name].ext.storage().to_numpy(), expected[name].reshape(3, -1))


def test_duckdb(live: Live) -> None:
    """DuckDB queries the table that pyarrow reads."""
    frame = read(ask(live).content)
    found = duckdb.sql("select list_sum(head), array_length(block1) from frame").fetchall()
    expected = arrays_of(ask(live, form="npz"))
    np.testing.assert_allclose([row[0] for row in found], expected["head"].sum(1), 1e-5)
    assert [row[1] for row in found] == [math.prod(SHAPE)] * 3
    assert frame.num_rows == 3


REFUSED: dict[str, tuple[Json, str]] = {
    "statistics of all inputs": (
        {"layers": [{"layer": "block2", "stats": ["max"], "over": "inputs"}]},
        "'block2' is one",
    ),
    "several shapes": (
        {"layers": ["block1"], "inputs": [tensor(np.zeros((3, size, 32), np.float32)) for size in (32, 40)]},
        "'block1.input0' has another shape",
    ),
    "a scale's name": (
        {"layers": [{"layer": "head", "dtype": "int8", "as": "a"}, {"layer": "pool", "as": "a.scale"}]},
        "'a.scale'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(live: Live, name: str) -> None:
    """What has no row for each input is refused, with the format that has room for it."""
    changes, says = REFUSED[name]
    body = problem(live.client.post("/extract", json=BODY | changes, params={"format": "arrow"}), 406)
    assert says in body["detail"]
    assert "format=npz" in body["errors"][0]["hint"] or "scale" in name


def test_several_shapes(live: Live) -> None:
    """Of inputs of several shapes, what has one shape for all of them is a column as ever."""
    inputs = [tensor(np.ones((3, size, 32), np.float32)) for size in (32, 40, 48)]
    table = read(ask(live, {"layers": ["head", "pool"], "inputs": inputs}).content)
    assert {name: array.shape for name, array in columns_of(table).items()} == {"head": (3, 10), "pool": (3, 64, 1, 1)}


def test_rows_on_another_axis(serve: Serve) -> None:
    """Where a model has its rows on another axis they come first; what has none is refused."""
    spec = ModelSpec("tower", "python:tests.service.nets_batch:Tower", weights="random:0", device="cpu", inputs=(ROW,))
    body: Json = {"model": "tower", "inputs": [tensor(row) for row in np.eye(4, dtype=np.float32)[:3]]}
    with serve(configured(spec)) as live:
        found = columns_of(read(ask(live, body | {"layers": ["norm", "conv"]}).content))
        expected = arrays_of(ask(live, body | {"layers": ["norm", "conv"]}, "npz"))
        refused = live.client.post("/extract", json=body | {"layers": ["table"]}, params={"format": "arrow"})
    assert expected["norm"].shape == (16, 3, 24)
    np.testing.assert_array_equal(found["norm"], np.moveaxis(expected["norm"], 1, 0))
    np.testing.assert_array_equal(found["conv"], expected["conv"])
    assert "'table' is one for all inputs" in problem(refused, 406)["detail"]


DTYPES = st.sampled_from(["float32", "float16", "float64", "int8", "int64", "uint8", "bool", "int32"])


@given(data=st.data(), rows=st.integers(1, 4))
def test_any_features(data: st.DataObject, rows: int) -> None:
    """Arrays of any dtype and shape, rows on any axis and several entries a row, come back row by row."""
    arrays: dict[str, Array] = {}
    axes: dict[str, int] = {}
    chance = np.random.default_rng(rows)
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        axis, folded = data.draw(st.integers(0, len(shape))), data.draw(st.integers(1, 3))
        shape.insert(axis, rows * folded)
        key = f"layer{number}"
        arrays[key] = np.array(chance.integers(0, 100, shape)).astype(data.draw(DTYPES))
        axes[key] = axis
    result = features(arrays, rows=rows, receipts={key: receipt(key, row_axis=axis) for key, axis in axes.items()})
    table = read(b"".join(FORMATS["arrow"].encode(result, EncodeOptions())))
    assert table.num_rows == rows
    for key, found in columns_of(table).items():
        size = arrays[key].shape[axes[key]] // rows
        for row in range(rows):
            indices = range(row * size, (row + 1) * size)
            expected = np.moveaxis(np.take(arrays[key], indices, axes[key]), axes[key], 0)
            dtype = np.uint8 if arrays[key].dtype == bool else arrays[key].dtype
            assert np.asarray(found[row]).dtype == dtype
            np.testing.assert_array_equal(np.asarray(found[row]).reshape(expected.shape), expected)


def test_no_copy() -> None:
    """The numbers are in the buffers that are sent, not in a copy of them."""
    array = np.ones((4, 1000, 10), np.float32)
    buffers = FORMATS["arrow"].encode(features({"x": array}, rows=4), EncodeOptions())
    (large,) = (each for each in buffers if len(each) == array.nbytes)
    assert np.shares_memory(np.frombuffer(large, np.float32), array)


def test_same_bytes() -> None:
    """The same features give the same bytes each time."""
    result = features(
        {"x": np.ones((2, 3), np.float32), "y": np.ones(2, np.int8)}, scales={"y": np.ones(2, np.float32)}
    )
    assert len({b"".join(FORMATS["arrow"].encode(result, EncodeOptions())) for _ in range(20)}) == 1


def test_int8_by_another_axis() -> None:
    """Scales that are not of rows are no column."""
    result: Features = features(
        {"x": np.ones((3, 2), np.int8)},
        scales={"x": np.ones(3, np.float32)},
        receipts={"x": receipt("x", row_axis=1)},
    )
    with pytest.raises(NotAcceptableError, match="axis 1"):
        FORMATS["arrow"].encode(result, EncodeOptions())


def test_without_pyarrow(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyarrow is missing the format is refused before anything is done, with what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for query in ({"format": "arrow"}, {"format": "arrow", "dry_run": "true"}):
        body = problem(live.client.post("/extract", content=b"no JSON", params=query), 406)
        assert 'pip install "layertap[arrow]"' in body["errors"][0]["hint"]
    assert ask(live, form="json").status_code == 200


@pytest.mark.slow
def test_not_imported() -> None:
    """Whoever asks for no Arrow pays nothing for it."""
    code = "import sys, layertap.service.app, layertap.service.cli.pictures; print('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
