"""What others who read Parquet by code of their own make of a job's: the same vectors, null where there is none."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import polars

from tests.service.bulk.conftest import read, write_pictures
from tests.service.cli.commands import Command


def test_readers(command: Command, tmp_path: Path) -> None:
    """Rows and vectors are those that pyarrow reads."""
    write_pictures(tmp_path / "source", 10)
    (tmp_path / "source" / "00003.jpg").write_bytes(b"broken")
    out = tmp_path / "out.parquet"
    assert command("bulk", tmp_path / "source", "--layers", "pool", "--pool", "mean", "--out", out).status == 0
    wanted = read(out)["pool"]
    assert [vector is None for vector in wanted].count(True) == 1
    with duckdb.connect() as database:
        by_duckdb = [row[0] for row in database.execute("SELECT pool FROM read_parquet(?)", [str(out)]).fetchall()]
    for found in (by_duckdb, polars.read_parquet(out)["pool"].to_list()):
        vectors = [vector if vector is None else np.asarray(vector, np.float32).tolist() for vector in found]
        assert vectors == wanted
