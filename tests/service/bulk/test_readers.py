"""What others make of a job's Parquet: the same vectors, null where there is none, and near ones are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.bulk.conftest import read, write_pictures
from tests.service.cli.commands import Command

BROKEN = "00003.jpg"


@pytest.fixture
def index(command: Command, tmp_path: Path) -> Path:
    """Vectors of nine pictures, and a row of one that is broken."""
    write_pictures(tmp_path / "source", 10)
    (tmp_path / "source" / BROKEN).write_bytes(b"broken")
    out = tmp_path / "index.parquet"
    assert command("bulk", tmp_path / "source", "--layers", "pool", "--pool", "mean", "--out", out).status == 0
    return out


def read_pandas(path: Path) -> list[Any]:
    import pandas

    return list(pandas.read_parquet(path)["pool"])


def read_polars(path: Path) -> list[Any]:
    import polars

    return polars.read_parquet(path)["pool"].to_list()


def read_duckdb(path: Path) -> list[Any]:
    import duckdb

    with duckdb.connect() as database:
        return [row[0] for row in database.execute("SELECT pool FROM read_parquet(?)", [str(path)]).fetchall()]


def read_datasets(path: Path) -> list[Any]:
    from datasets import Dataset

    return list(Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache"))["pool"])


READERS: dict[str, Callable[[Path], list[Any]]] = {
    "pandas": read_pandas,
    "polars": read_polars,
    "duckdb": read_duckdb,
    "datasets": read_datasets,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READERS)
def test_readers(index: Path, name: str) -> None:
    """Rows and vectors are those that pyarrow reads."""
    expected, found = read(index)["pool"], READERS[name](index)
    assert len(found) == len(expected) == 10
    for wanted, vector in zip(expected, found, strict=True):
        assert (wanted is None) == (vector is None)
        if wanted is not None:
            assert np.asarray(vector, np.float32).tolist() == wanted
