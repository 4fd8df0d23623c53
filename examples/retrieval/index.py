"""A searchable index of vectors: a LanceDB table beside the file that ``layertap bulk`` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from vectors import VectorFile, Vectors

os.environ.setdefault("LANCEDB_LOG", "error")  # else it warns of every new table

import lancedb

NAME = "vectors"
MADE_OF = "made-of"
BATCH = 10_000


@dataclass(frozen=True)
class Hit:
    """A picture that was found, and the cosine of its vector and the one that was looked for."""

    key: str
    cosine: float


class Index:
    """The vectors of a file, in order of nearness to any other."""

    def __init__(self, file: VectorFile) -> None:
        """Open the index beside a file; make it where there is none, or where the file has changed since.

        It is a folder with the file's name and ``.lancedb``. RefusedError where the vectors can't be compared.
        """
        self.file = file
        folder = file.path.with_suffix(".lancedb")
        status = file.path.stat()
        made_of = f"{file.column} {status.st_size} {status.st_mtime_ns}"
        database = lancedb.connect(folder)
        if NAME in database.list_tables().tables:
            self._table = database.open_table(NAME)
            if (self._table.schema.metadata or {}).get(MADE_OF.encode()) == made_of.encode():
                return
        file.check_fingerprints()
        schema = pa.schema(
            {"key": pa.string(), "vector": pq.read_schema(file.path).field(file.column).type}, {MADE_OF: made_of}
        )
        rows = pa.RecordBatchReader.from_batches(schema, _read(file, schema))
        self._table = database.create_table(NAME, rows, mode="overwrite")

    def __len__(self) -> int:
        """How many pictures can be found."""
        count: int = self._table.count_rows()
        return count

    def search(self, vectors: Vectors, count: int) -> list[list[Hit]]:
        """For each vector (N, C) the nearest pictures by cosine, the nearest first.

        Every vector is looked at. From some hundred thousand on, LanceDB's ``create_index`` makes that quicker.
        """
        return [self._search(vector, count) for vector in vectors]

    def _search(self, vector: Vectors, count: int) -> list[Hit]:
        search = self._table.search(vector, vector_column_name="vector").distance_type("cosine").limit(count)
        return [Hit(row["key"], 1 - row["_distance"]) for row in search.select(["key", "_distance"]).to_list()]


def _read(file: VectorFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Keys and vectors, without the pictures that have none."""
    for batch in pq.ParquetFile(file.path).iter_batches(BATCH, columns=["key", file.column]):
        rows = batch.filter(batch.column(file.column).is_valid())
        yield pa.record_batch([rows.column("key"), rows.column(file.column)], schema=schema)
