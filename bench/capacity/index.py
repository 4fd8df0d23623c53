"""How quickly vectors are written: to Parquet, and to the vector store of the examples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BATCH = 1000


def measure_writes(rows: int, dimensions: int) -> dict[str, dict[str, float]]:
    """Rows and bytes a second, for float32 vectors with a key, in batches of a thousand; nothing is indexed."""
    batches = list(make_batches(rows, dimensions))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.perf_counter()
        with pq.ParquetWriter(folder / "vectors.parquet", batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        parquet_s = time.perf_counter() - begun
        begun = time.perf_counter()
        table = lancedb.connect(folder / "lance").create_table("vectors", schema=batches[0].schema)
        for batch in batches:
            table.add(pa.Table.from_batches([batch]))
        lance_s = time.perf_counter() - begun
    size = rows * dimensions * 4
    return {
        name: {"rows_per_s": round(rows / seconds), "mb_per_s": round(size / seconds / 1e6, 1)}
        for name, seconds in (("parquet", parquet_s), ("lancedb", lance_s))
    }


def make_batches(rows: int, dimensions: int) -> Iterator[pa.RecordBatch]:
    """Random vectors with their keys."""
    random = np.random.default_rng(0)
    for first in range(0, rows, BATCH):
        values = pa.array(random.standard_normal(BATCH * dimensions, np.float32))
        keys = pa.array([f"{number:012}" for number in range(first, first + BATCH)])
        yield pa.record_batch([keys, pa.FixedSizeListArray.from_arrays(values, dimensions)], ["key", "vector"])
