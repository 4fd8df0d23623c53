"""Inputs of a complete job that have no result are answered again.

They are a job of their own beside the complete one, and may be interrupted as any other. Once it is complete its
rows replace the old ones: each file is replaced whole, and is the old one or the new one whenever the
process is killed.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from layertap.models.errors import LayertapError
from layertap.service.bulk.arrow import import_parquet
from layertap.service.bulk.bulk import (
    Destination,
    Job,
    Observer,
    Summary,
    list_tables,
    read_column,
    remove,
    run,
    summarize,
)
from layertap.service.bulk.job import Extractor
from layertap.service.bulk.manifest import OTHERWISE, lock_folder
from layertap.service.bulk.parts import read_batches, write_batches
from layertap.service.bulk.shards import LAYOUTS
from layertap.service.bulk.sources import Source

OpenSource = Callable[[int], Source]
FOLDER = "{name}.retry-{digest}"  # beside the job's file or folder, by the numbers of the rows
DIGITS = 12


def check_retry(job: Job) -> None:
    """LayertapError where a job's rows can't be replaced one by one."""
    if LAYOUTS[job.destination.layout].write_shard is not None:
        hint = f"--retry-errors is for vectors, not for {job.destination.layout}; --restart begins anew"
        raise LayertapError("arrays stand in files that are shared by many inputs", hint=hint)


async def retry_errors(job: Job, extractor: Extractor, open_source: OpenSource, observer: Observer) -> Summary:
    """Answer the pictures of a complete job that have an error, and put their rows in its place; LayertapError."""
    tables = list_tables(job.destination)
    numbers = _find_errors(tables)
    inner = replace(job, destination=Destination(_name_folder(job.destination, numbers), None, "parquet"))
    remove_retries(job.destination, but=inner.destination.folder)
    if numbers:

        def open_selected(limit: int) -> Source:
            return open_source(limit).select(numbers)

        await run(inner, extractor, open_selected, observer)
        with lock_folder(inner.destination.folder):
            _replace_rows(tables, list_tables(inner.destination))
        remove(inner.destination)
    return summarize(tables)


def remove_retries(target: Destination, but: Path | None = None) -> None:
    """Remove what earlier retries have left: of other rows, or killed after their rows had been put in."""
    out = target.file or target.folder
    for folder in out.parent.glob(FOLDER.format(name=glob.escape(out.name), digest="?" * DIGITS)):
        if folder != but:
            remove(Destination(folder, None, "parquet"))


def _name_folder(target: Destination, numbers: Sequence[int]) -> Path:
    out = target.file or target.folder
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:DIGITS]
    return out.with_name(FOLDER.format(name=out.name, digest=digest))


def _find_errors(tables: Sequence[Path]) -> list[int]:
    """The numbers of the rows that have an error, counted through all tables."""
    numbers: list[int] = []
    first = 0
    for table in tables:
        errors = read_column(table, "error")
        numbers += (first + np.flatnonzero(errors.is_valid().to_numpy())).tolist()
        first += len(errors)
    return numbers


def _replace_rows(tables: Sequence[Path], answers: Sequence[Path]) -> None:
    """Write the tables anew, each whole, with other rows for those that have an error; those without any stay."""
    parquet = import_parquet()
    rows = _Rows(read_batches(answers))
    for table in tables:
        if read_column(table, "error").is_valid().to_numpy().any():
            size = parquet.read_metadata(table).row_group(0).num_rows
            write_batches(_exchange(read_batches([table]), rows), table, parquet.read_schema(table), size)


def _exchange(batches: Iterator[Any], rows: _Rows) -> Iterator[Any]:
    """Record batches with other rows for those that have an error; LayertapError where these are of other pictures."""
    import pyarrow as pa

    for batch in batches:
        indices = np.flatnonzero(batch.column("error").is_valid().to_numpy(zero_copy_only=False))
        if not len(indices):
            yield batch
            continue
        others = rows.take(len(indices))
        if others.column("key").to_pylist() != batch.column("key").take(pa.array(indices)).to_pylist():
            raise LayertapError("the source has other inputs than before, or in another order", hint=OTHERWISE)
        order = np.arange(batch.num_rows)
        order[indices] = batch.num_rows + np.arange(len(indices))
        both = pa.concat_tables([pa.Table.from_batches([batch]), others]).combine_chunks()
        yield from both.take(pa.array(order)).combine_chunks().to_batches()


class _Rows:
    """Rows of record batches, some at a time."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._table: Any = None

    def take(self, count: int) -> Any:
        """A table of the next so many."""
        import pyarrow as pa

        while self._table is None or self._table.num_rows < count:
            more = pa.Table.from_batches([next(self._batches)])
            self._table = more if self._table is None else pa.concat_tables([self._table, more])
        taken, self._table = self._table.slice(0, count), self._table.slice(count)
        return taken
