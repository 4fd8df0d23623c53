"""A job's output: parts, each written atomically, and in the end one file of all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from layertap.models.errors import LayertapError, escape
from layertap.service.bulk.arrow import import_parquet, summarize
from layertap.service.bulk.job import Column, Outline, Rows
from layertap.service.bulk.manifest import OTHERWISE, replace_file
from layertap.service.bulk.reductions import Reducer
from layertap.service.bulk.sources import Entry
from layertap.service.features import Array
from layertap.service.formats.sparse import SparseRows

REDUCED = "reductions"  # a layout
PART = "part-{start:012d}"
RESERVED = frozenset({"key", "digest", "fingerprint", "space", "error", "shard", "row"})
GROUP_ROWS, GROUP_BYTES = 8192, 64 * 2**20  # of a row group of the final file
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["fingerprint", "space", "error"],
}


@dataclass
class PartWriter:
    """Collects rows and writes them as the next part; with a reducer, results are folded into it and dropped.

    ``kept``: the types of the source's columns that are kept.
    """

    folder: Path
    outline: Outline
    layout: str
    first: int  # number of the next row to write
    reducer: Reducer | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    _rows: list[Rows] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the results that are not written yet."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the reducer's state, which is written whole with each part."""
        return self.reducer.nbytes if self.reducer is not None else 0

    def add(self, rows: Rows) -> None:
        """Add a batch."""
        if self.reducer is not None:
            start = self.first + sum(len(each.keys) for each in self._rows)
            good = [start + offset for offset, error in enumerate(rows.errors) if error is None]
            try:
                self.reducer.add(rows.arrays, np.array(good, np.int64))
            except BaseException:
                self._rows.clear()  # states may be half updated: resume from the last part's
                raise
            rows = replace(rows, arrays={})
        self._rows.append(rows)

    def flush(self) -> None:
        """Write the collected rows, if any, as a part."""
        if not self._rows:
            return
        name = PART.format(start=self.first)
        table = self._make_table(f"{name}.safetensors")
        with replace_file(self.folder / f"{name}.parquet") as temporary:
            import_parquet().write_table(table, temporary, **OPTIONS)
        self.first += len(table)
        self._rows.clear()
        if self.reducer is not None:
            for path in list_states(self.folder)[:-1]:
                path.unlink()

    def _make_table(self, shard: str) -> Any:
        """The rows as a table; results are its columns, or are written to a file of their own."""
        import pyarrow as pa

        parts = self._rows
        errors = [error for rows in parts for error in rows.errors]
        good = np.array([error is None for error in errors], bool)
        fingerprints = [rows.fingerprint if error is None else None for rows in parts for error in rows.errors]
        columns: dict[str, Any] = {
            "key": pa.array([key for rows in parts for key in rows.keys], pa.string()),
            "digest": pa.array([digest for rows in parts for digest in rows.digests], pa.string()),
        }
        if self.kept:
            kept = pa.Table.from_batches([batch for rows in parts for batch in rows.kept])
            columns |= {name: kept[name].cast(kind) for name, kind in self.kept.items()}
        columns |= WRITERS[self.layout](self, shard, good)
        columns["fingerprint"] = pa.array(fingerprints, pa.string())
        columns["space"] = pa.array([self.outline.space if each else None for each in good], pa.string())
        columns["error"] = pa.array(errors, pa.string())
        return pa.table(columns, metadata={})

    def _make_vector_columns(self, shard: str, good: Any) -> dict[str, Any]:
        arrays = self._concat_arrays()
        return {
            column.name: _make_lists(arrays[column.name], good, column)
            if column.by_token
            else _make_vectors(arrays[column.name], good)
            for column in self.outline.columns.values()
        }

    def _make_sparse_columns(self, shard: str, good: Any) -> dict[str, Any]:
        return {name: _make_sparse(name, array, good) for name, array in self._concat_arrays().items()}

    def _write_shard(self, shard: str, good: Any) -> dict[str, Any]:
        import pyarrow as pa

        with replace_file(self.folder / shard) as temporary:
            temporary.write_bytes(save(_join_texts(self._concat_arrays(), self.outline)))
        return {
            "shard": pa.array([shard if each else None for each in good], pa.string()),
            "row": pa.array(np.cumsum(good) - 1, pa.int64(), mask=~good),
        }

    def _write_state(self, shard: str, good: Any) -> dict[str, Any]:
        """Write the reductions of all rows so far; the part counts once its table is written."""
        if self.reducer is not None:
            with replace_file(self.folder / shard) as temporary:
                self.reducer.save(temporary)
        return {}

    def _concat_arrays(self) -> dict[str, Array]:
        return {
            column.name: np.ascontiguousarray(np.concatenate([rows.arrays[key] for rows in self._rows]))
            for key, column in self.outline.columns.items()
        }


WRITERS: dict[str, Callable[[PartWriter, str, Any], dict[str, Any]]] = {
    "parquet": PartWriter._make_vector_columns,
    "sparse": PartWriter._make_sparse_columns,
    "safetensors": PartWriter._write_shard,
    REDUCED: PartWriter._write_state,
}


def _make_vectors(array: Array, good: Any) -> Any:
    """Fixed-size lists, null for rows with an error."""
    import pyarrow as pa

    width = array.shape[1]
    values = np.zeros((len(good), width), array.dtype)
    values[good] = array
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width, mask=pa.array(~good))


def _make_lists(array: Array, good: Any, column: Column) -> Any:
    """Lists of fixed-size lists, one for each token of a text; null for rows with an error."""
    import pyarrow as pa

    width = column.shape[0]
    starts, tokens = _join_tokens(array, column)
    values = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), width)
    offsets = starts[np.concatenate([[0], np.cumsum(good)])]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=pa.array(~good))


def _make_sparse(name: str, array: Array, good: Any) -> Any:
    """Structures of ``indices`` and ``values``, null for rows with an error."""
    import pyarrow as pa

    rows = SparseRows.from_array(name, array)
    offsets = pa.array(rows.starts[np.concatenate([[0], np.cumsum(good)])], pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(each)) for each in (rows.indices, rows.values)]
    return pa.StructArray.from_arrays(lists, ["indices", "values"], mask=pa.array(~good))


def _join_texts(arrays: Mapping[str, Array], outline: Outline) -> dict[str, Array]:
    """Arrays for a file: the tokens of all texts are one, and ``NAME.starts`` says where each text begins and ends."""
    joined = dict(arrays)
    for column in outline.columns.values():
        if column.by_token:
            joined[f"{column.name}.starts"], joined[column.name] = _join_tokens(arrays[column.name], column)
    return joined


def _join_tokens(array: Array, column: Column) -> tuple[Array, Array]:
    """Where each text begins and ends, int64 (texts + 1,), and all tokens, (tokens, …)."""
    starts = np.cumsum([0, *map(len, array)], dtype=np.int64)
    return starts, np.concatenate([np.zeros((0, *column.shape), column.dtype), *array])


def check_columns(outline: Outline, layout: str, kept: Iterable[str]) -> None:
    """LayertapError if results, and what is kept of the source, do not fit a table."""
    results = [] if layout == REDUCED else [column.name for column in outline.columns.values()]
    taken = set(RESERVED)
    for name in (*kept, *results):
        if name in taken:
            detail = f"no result or kept column may be called {escape(name)}: another column has the name"
            raise LayertapError(detail, hint="call results otherwise with --as, or leave the column out of --keep")
        taken.add(name)
    for name, column in outline.columns.items():
        if layout in ("parquet", "sparse") and (len(column.shape) != 1 or (layout == "sparse" and column.by_token)):
            shape = [*(["tokens"] if column.by_token else []), *column.shape]
            raise LayertapError(
                f"{name} is {shape} for each input, and no vector",
                hint="add --pool mean, or --out a folder and --format safetensors",
            )


def list_parts(folder: Path) -> list[Path]:
    """The tables of a folder, in order."""
    return sorted(folder.glob("part-*.parquet"))


def list_states(folder: Path) -> list[Path]:
    """The files of a folder with the reducer's state after each part, in order."""
    return sorted(folder.glob("part-*.safetensors"))


def read_state(table: Path) -> dict[str, Array]:
    """The reducer's state after a part; LayertapError if its file is missing or damaged."""
    path = table.with_suffix(".safetensors")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise LayertapError(f"{path} is missing or damaged: {error}", hint=OTHERWISE) from error


def find_parts(folder: Path) -> list[Path]:
    """The tables of a folder, in order; LayertapError if some are missing.

    Removes unfinished files.
    """
    for left in folder.glob("*.tmp"):
        left.unlink()
    parts, count = list_parts(folder), 0
    for path in parts:
        if path.stem != PART.format(start=count):
            raise LayertapError(f"rows from {count} on are missing in {folder}", hint=OTHERWISE)
        with open_table(path) as file:
            count += file.metadata.num_rows
    return parts


def count_rows(tables: Iterable[Path]) -> tuple[int, int]:
    """How many rows tables have, and how many of them have an error instead of results."""
    errors = [read_column(table, "error") for table in tables]
    return sum(map(len, errors)), sum(len(each) - each.null_count for each in errors)


def check_keys(entries: Iterator[Entry], tables: Sequence[Path], *, complete: bool = False) -> None:
    """Read as many entries as tables have rows; LayertapError unless they are the same inputs in the same order.

    ``complete``: no more entries may follow.
    """
    end = Entry("", None)
    keys = (key for table in tables for key in read_column(table, "key").to_pylist())
    for before in keys:
        now = next(entries, end)
        if now.key != before:
            what = f"there is {now.key} now" if now is not end else f"{before} is gone"
            raise LayertapError(f"the source has other inputs than before: {what}", hint=OTHERWISE)
    if complete and (more := next(entries, None)) is not None:
        raise LayertapError(f"the source has other inputs than before: there is {more.key} now", hint=OTHERWISE)


def name_inputs(numbers: Iterable[int], tables: Sequence[Path]) -> dict[int, str]:
    """The keys of some inputs by their numbers."""
    names, start, waiting = dict[int, str](), 0, sorted(set(numbers), reverse=True)
    for table in tables:
        keys = read_column(table, "key")
        while waiting and waiting[-1] < start + len(keys):
            number = waiting.pop()
            names[number] = keys[number - start].as_py()
        start += len(keys)
    return names


def merge_parts(parts: Sequence[Path], path: Path, metadata: Mapping[str, str], row_bytes: int) -> None:
    """Merge all parts into one file, whose bytes depend only on the rows, not on where parts end."""
    import pyarrow as pa

    parquet = import_parquet()
    schema = parquet.read_schema(parts[0]).with_metadata({**metadata})
    size = max(1, min(GROUP_ROWS, GROUP_BYTES // max(row_bytes, 1)))
    table = schema.empty_table()
    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema, **OPTIONS) as writer:
        for part in parts:
            with open_table(part) as file:
                table = pa.concat_tables([table, file.read().replace_schema_metadata(schema.metadata)])
            while len(table) >= size:
                writer.write_table(table.slice(0, size).combine_chunks(), size)
                table = table.slice(size)
        if len(table):
            writer.write_table(table.combine_chunks(), size)


def read_column(table: Path, name: str) -> Any:
    """A column of a job's table; LayertapError if the file is damaged."""
    with open_table(table) as file:
        return file.read([name]).column(0)


@contextmanager
def open_table(path: Path) -> Iterator[Any]:
    """Open a job's table as a ``ParquetFile``; LayertapError if it is damaged, also while it is read."""
    try:
        with import_parquet().ParquetFile(path) as file:
            yield file
    except (OSError, ValueError) as error:
        raise LayertapError(f"{path} is damaged: {summarize(error)}", hint=OTHERWISE) from error
