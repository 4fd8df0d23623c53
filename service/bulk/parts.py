"""What a job writes: a part after another, each there whole or not at all, and in the end one file of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from layertap.models.errors import LayertapError
from layertap.service.bulk.arrow import import_parquet, summarize
from layertap.service.bulk.job import Outline, Rows
from layertap.service.bulk.manifest import OTHERWISE, replace_file
from layertap.service.bulk.shards import Layout
from layertap.service.bulk.sources import Entry

PART = "part-{start:012d}"
GROUP_ROWS, GROUP_BYTES = 8192, 64 * 2**20  # of a row group of the file in the end
READ_ROWS = 1024
KEYS, FIRST, COUNT = b"keys", b"first", b"count"


@dataclass(frozen=True)
class PartFile:
    """Rows that are written, as their file tells: the first one's number, how many, a digest of their keys."""

    path: Path
    first: int
    count: int
    keys: str


@dataclass
class PartWriter:
    """Collects rows, and writes them as the next part."""

    folder: Path
    outline: Outline
    layout: Layout
    first: int  # number of the next row
    _rows: list[Rows] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the results that are not written yet."""
        return sum(rows.nbytes for rows in self._rows)

    def add(self, rows: Rows) -> None:
        """Add a batch."""
        self._rows.append(rows)

    def flush(self) -> None:
        """Write what was added, where there is something."""
        if not self._rows:
            return
        parquet = import_parquet()
        name = PART.format(start=self.first)
        table = self.layout.make_table(self.folder, name, self._rows, self.outline)
        keys = [key for rows in self._rows for key in rows.keys]
        facts = {KEYS: digest_keys(keys), FIRST: str(self.first).encode(), COUNT: str(len(keys)).encode()}
        with replace_file(self.folder / f"{name}.parquet") as temporary:
            parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, **facts}), temporary, **OPTIONS)
        self.first += len(keys)
        self._rows.clear()


def find_parts(folder: Path) -> list[PartFile]:
    """The parts of a folder, in order, without a gap; LayertapError. What was begun and not finished is removed."""
    for left in folder.glob("*.tmp"):
        left.unlink()
    parts = [_read_part(path) for path in sorted(folder.glob("part-*.parquet"))]
    expected = 0
    for part in parts:
        if part.first != expected:
            raise LayertapError(f"rows from {expected} on are missing in {folder}", hint=OTHERWISE)
        expected += part.count
    return parts


def check_keys(entries: Iterator[Entry], parts: Sequence[PartFile]) -> None:
    """Take as many entries as parts have rows; LayertapError where they are not the same pictures in the same order."""
    for part in parts:
        keys = [entry.key for entry in islice(entries, part.count)]
        if digest_keys(keys).decode() != part.keys:
            raise LayertapError(
                f"the source has other inputs than before, or in another order, after the first {part.first}",
                hint=OTHERWISE,
            )


def digest_keys(keys: Iterable[str]) -> bytes:
    """A digest of keys in their order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode() + b"\0")
    return digest.hexdigest().encode()


def merge_parts(parts: Sequence[PartFile], path: Path, metadata: Mapping[str, str], row_bytes: int) -> None:
    """All parts as one file, which depends on their rows alone: not on where a part ends."""
    schema = import_parquet().read_schema(parts[0].path).with_metadata({**metadata})
    size = max(1, min(GROUP_ROWS, GROUP_BYTES // max(row_bytes, 1)))
    write_batches(read_batches([part.path for part in parts]), path, schema, size)


def write_batches(batches: Iterator[Any], path: Path, schema: Any, size: int) -> None:
    """Record batches as one file, in groups of ``size`` rows."""
    parquet = import_parquet()
    import pyarrow as pa

    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema, **OPTIONS) as writer:
        for group in _regroup(batches, size):
            writer.write_table(pa.Table.from_batches(group, schema).combine_chunks(), size)


def read_batches(paths: Iterable[Path]) -> Iterator[Any]:
    """The record batches of what a job has written, without metadata; LayertapError where that is damaged."""
    for path in paths:
        with open_table(path) as file:
            for batch in file.iter_batches(READ_ROWS):
                yield batch.replace_schema_metadata(None)


def _regroup(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Record batches, as many as have so many rows together."""
    group: list[Any] = []
    missing = size
    for batch in batches:
        rest = batch
        while rest.num_rows >= missing:
            yield [*group, rest.slice(0, missing)]
            rest, group, missing = rest.slice(missing), [], size
        if rest.num_rows:
            group.append(rest)
            missing -= rest.num_rows
    if group:
        yield group


@contextmanager
def open_table(path: Path) -> Iterator[Any]:
    """A ``ParquetFile`` of what a job has written; LayertapError where that is damaged, also while it is read."""
    try:
        with import_parquet().ParquetFile(path) as file:
            yield file
    except LayertapError:
        raise
    except (OSError, ValueError) as error:
        raise LayertapError(f"{path} is damaged: {summarize(error)}", hint=OTHERWISE) from error


def _read_part(path: Path) -> PartFile:
    try:
        facts = import_parquet().read_schema(path).metadata
        return PartFile(path, int(facts[FIRST]), int(facts[COUNT]), facts[KEYS].decode())
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise LayertapError(f"{path} is no part of a job", hint=OTHERWISE) from error


def make_metadata(outline: Outline, question: Mapping[str, Any]) -> dict[str, str]:
    """What a file says of all its rows: ``layertap check`` reads it."""
    return {
        "model": outline.model,
        "fingerprint": outline.fingerprint,
        "receipts": orjson.dumps(outline.receipts).decode(),
        "question": orjson.dumps(question).decode(),
    }


OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "use_dictionary": ["fingerprint", "error"]}
