"""A job from its beginning to its end, however often it is interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from layertap.models.catalog.catalog import UNREPEATABLE
from layertap.models.errors import LayertapError
from layertap.service.bulk.arrow import import_parquet
from layertap.service.bulk.job import BatchLimits, Extractor, Outline, Question, RemainingJob, Rows
from layertap.service.bulk.manifest import (
    LOCK,
    NAME,
    OTHERWISE,
    Manifest,
    check_same_job,
    check_same_model,
    lock_folder,
)
from layertap.service.bulk.parts import PartWriter, check_keys, find_parts, make_metadata, merge_parts, open_table
from layertap.service.bulk.pipeline import write_rows
from layertap.service.bulk.shards import LAYOUTS
from layertap.service.bulk.sources import Source

PARTS = ".parts"  # behind a file's name: the folder that it grows in
INDEX = "index.parquet"  # of shards
OWN = ("part-*", f"{INDEX}*", f"{NAME}.*", NAME)  # the manifest last: until then they are known to be a job's
ROW_BYTES = 256  # about, of an index of shards
TARGET_BYTES = 64 * 2**20  # of a batch's results


@dataclass(frozen=True)
class Destination:
    """Where results go: a single file in the end (``file``), or a folder that keeps its parts."""

    folder: Path
    file: Path | None
    layout: str

    @classmethod
    def parse(cls, out: Path, layout: str | None) -> Destination:
        """By the name that was given: one that ends in ``.parquet`` is a file; LayertapError."""
        if out.suffix != ".parquet":
            return cls(out, None, layout or "parquet")
        if layout not in (None, "parquet"):
            raise LayertapError(f"{layout} is for a folder", hint=f"write --out {out.with_suffix('')}")
        return cls(out.with_name(out.name + PARTS), out, "parquet")


@dataclass(frozen=True)
class Job:
    """What is asked of which source, and where it goes."""

    question: Question
    source: str
    destination: Destination
    column: str | None = None  # of a table

    @property
    def location(self) -> str:
        """The source, wherever it is named from."""
        return os.path.abspath(self.source)  # noqa: PTH100  (a pattern is no path)

    def describe(self) -> dict[str, Any]:
        """All but where it goes, as plain data."""
        return {**self.question.describe(), "source": self.location, "column": self.column}


@dataclass(frozen=True)
class Summary:
    """How many rows there are, and how many of them are errors."""

    rows: int
    errors: int


class Observer(Protocol):
    """Shows the progress of a job."""

    def start(self, rows: int, count: Callable[[], int | None]) -> None:
        """Begin after ``rows`` rows; ``count`` gives the number of all rows, and may take long."""

    def advance(self, rows: Rows) -> None:
        """A batch is answered."""


def find_complete(job: Job, source: Source) -> tuple[Summary, Outline] | None:
    """The summary and the outline of a job that is complete, else None; LayertapError for the output of another job.

    The inputs' names are compared with those of ``source``, not what is in them.
    """
    target = job.destination
    _finish_cleaning(target)
    if target.file is not None and target.file.exists() and not (target.folder / NAME).exists():
        metadata = read_metadata(target.file)
        outline = Outline(metadata[b"model"].decode(), metadata[b"fingerprint"].decode(), {}, {})
        check_same_job(json.loads(metadata[b"question"]), job.describe(), outline.model)
    else:
        manifest = Manifest.read(target.folder)
        if manifest is None or not manifest.complete:
            return None
        manifest.check_same(job.describe(), target.layout)
        outline = manifest.outline
    _check_pictures(list_tables(target), source)
    return summarize(list_tables(target)), outline


def remove(destination: Destination) -> None:
    """Remove what a job has written, and nothing else; LayertapError for what no job has written."""
    folder, file = destination.folder, destination.file
    if file is not None and file.exists():
        read_metadata(file)
    if Manifest.read(folder) is not None:
        with lock_folder(folder):
            for pattern in OWN:
                for path in folder.glob(pattern):
                    path.unlink()
        (folder / LOCK).unlink()
        with suppress(OSError):  # what else is there stays
            folder.rmdir()
    if file is not None:
        file.unlink(missing_ok=True)


def check_replacement(job: Job, outline: Outline) -> None:
    """LayertapError where a job could not replace the existing output."""
    LAYOUTS[job.destination.layout].check(outline)
    if job.destination.folder.exists():
        check_folder(job.destination.folder)


def check_folder(folder: Path) -> None:
    """LayertapError for a folder that is not empty and not a job's."""
    begun = {LOCK, f"{NAME}.tmp"}  # what is there where a job was killed before all else
    if not (folder / NAME).exists() and any(path.name not in begun for path in folder.iterdir()):
        raise LayertapError(f"{folder} has other files in it", hint="choose another --out")


async def run(job: Job, extractor: Extractor, open_source: Callable[[int], Source], observer: Observer) -> Summary:
    """Answer what is not answered yet; LayertapError. ``open_source`` gets the most bytes that a picture may have."""
    target = job.destination
    await asyncio.to_thread(import_parquet)  # takes a second, in which batches would wait later
    target.folder.mkdir(parents=True, exist_ok=True)
    check_folder(target.folder)
    with lock_folder(target.folder):
        manifest = await _begin(job, extractor)
        source = open_source(extractor.max_picture_bytes)
        parts = await asyncio.to_thread(find_parts, target.folder)
        first = sum(part.count for part in parts)
        entries = source.iterate(first)
        await asyncio.to_thread(check_keys, entries, parts)
        observer.start(first, source.count)
        writer = PartWriter(target.folder, manifest.outline, LAYOUTS[target.layout], first)
        reopen = partial(open_source, extractor.max_picture_bytes)
        remaining = RemainingJob(job.question, manifest.outline, manifest.limits, entries, reopen, first)
        await write_rows(extractor.answer(remaining), writer, observer.advance)
        return await asyncio.to_thread(_finish, job, manifest)


async def _begin(job: Job, extractor: Extractor) -> Manifest:
    """The manifest of the job, written now where there is none; LayertapError where it is of another."""
    target = job.destination
    manifest = Manifest.read(target.folder)
    if manifest is not None:
        manifest.check_same(job.describe(), target.layout)
    outline = await extractor.outline(job.question)
    if outline.fingerprint.startswith(UNREPEATABLE):
        raise LayertapError(
            f"model {outline.model} is not deterministic: no two of its vectors can be compared",
            hint="find in its code what draws random numbers outside of training",
        )
    if manifest is not None:
        check_same_model(manifest.outline, outline)
        return manifest
    LAYOUTS[target.layout].check(outline)
    rows = max(1, min(extractor.max_rows, TARGET_BYTES // max(outline.row_bytes, 1)))
    limits = BatchLimits(rows, extractor.max_batch_bytes)
    manifest = Manifest(job.question, job.location, job.column, outline, limits, target.layout)
    manifest.save(target.folder)
    return manifest


def _finish(job: Job, manifest: Manifest) -> Summary:
    """Make the output of the parts."""
    target, outline = job.destination, manifest.outline
    parts = find_parts(target.folder)
    if not parts:
        raise LayertapError(f"there is nothing in {job.source}")
    metadata = make_metadata(outline, job.describe())
    if target.file is not None:
        merge_parts(parts, target.file, metadata, outline.row_bytes)
    elif LAYOUTS[target.layout].write_shard is not None:
        merge_parts(parts, target.folder / INDEX, metadata, ROW_BYTES)
    manifest.finish(target.folder)
    _clean(target)
    return summarize(list_tables(target))


def _clean(target: Destination) -> None:
    """Remove what a complete job needs no more; its manifest says so until the last, whenever it is killed."""
    if target.file is None and LAYOUTS[target.layout].write_shard is None:
        return  # parts are what was asked for
    for path in target.folder.glob("part-*.parquet"):
        path.unlink()
    if target.file is not None:
        (target.folder / NAME).unlink()
        shutil.rmtree(target.folder)


def _finish_cleaning(target: Destination) -> None:
    """Remove what a job that was killed while it cleaned has left."""
    manifest = Manifest.read(target.folder)
    final = target.file or target.folder / INDEX
    if manifest is not None and manifest.complete and manifest.layout == target.layout and final.exists():
        with lock_folder(target.folder):
            _clean(target)
    elif manifest is None and target.file is not None and target.file.exists() and _is_emptied(target.folder):
        shutil.rmtree(target.folder)


def _is_emptied(folder: Path) -> bool:
    """Whether nothing is left of a job but the file that locks its folder."""
    return folder.is_dir() and all(path.name == LOCK for path in folder.iterdir())


def list_tables(target: Destination) -> list[Path]:
    """The tables of a complete job that have a row for each picture, in order."""
    if target.file is not None:
        return [target.file]
    index = target.folder / INDEX
    return [index] if index.exists() else sorted(target.folder.glob("part-*.parquet"))


def _check_pictures(tables: Sequence[Path], source: Source) -> None:
    """LayertapError where what is complete is not of the pictures that a source has now."""
    answered = (key for path in tables for key in read_column(path, "key").to_pylist())
    there = (entry.key for entry in source.iterate(sys.maxsize))  # none of them is read
    for before, now in zip_longest(answered, there):
        if before != now:
            what = f"there is {now} now, which was not there then" if now is not None else f"{before} is gone"
            raise LayertapError(f"{tables[0].name} is complete, and of other inputs: {what}", hint=OTHERWISE)


def read_column(table: Path, name: str) -> Any:
    """A column of what a job has written; LayertapError where that is damaged."""
    with open_table(table) as file:
        return file.read([name]).column(0)


def summarize(tables: Sequence[Path]) -> Summary:
    """How many rows there are in what is complete; LayertapError."""
    columns = [read_column(path, "error") for path in tables]
    return Summary(sum(map(len, columns)), sum(len(column) - column.null_count for column in columns))


def read_metadata(file: Path) -> Mapping[bytes, bytes]:
    """What a file says of the job that made it; LayertapError where none did."""
    try:
        metadata: Mapping[bytes, bytes] = import_parquet().read_schema(file).metadata or {}
        if metadata.keys() >= {b"model", b"question"} and isinstance(json.loads(metadata[b"question"]), dict):
            return metadata
    except (OSError, ValueError):
        pass
    raise LayertapError(f"{file} is there already, and none of ours", hint="choose another --out")
