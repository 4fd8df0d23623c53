"""Runs a job from start to end, and resumes it after interruptions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from layertap.models.errors import UNREPEATABLE, LayertapError, escape
from layertap.service.bulk.arrow import import_parquet
from layertap.service.bulk.atlas import make_atlas
from layertap.service.bulk.job import BatchLimits, Extractor, Outline, Question, Rows, cut_batches
from layertap.service.bulk.manifest import LOCK, NAME, Manifest, check_same_model, lock_folder, replace_file
from layertap.service.bulk.parts import (
    REDUCED,
    PartWriter,
    check_columns,
    check_keys,
    count_rows,
    find_parts,
    list_parts,
    list_states,
    merge_parts,
    name_inputs,
    read_column,
    read_state,
)
from layertap.service.bulk.pipeline import answer_batches, write_rows
from layertap.service.bulk.reductions import CKA, HSIC, MAX_COVARIANCE, REDUCTIONS, UNMERGEABLE, Reducer
from layertap.service.bulk.sources import ALL_DEFAULT, Columns, Source
from layertap.service.formats.numpy_files import encode_arrays

PARTS = ".parts"  # suffix of the folder in which a file's parts are written
TOP_INPUTS, TOP_NAMES = ".top_inputs", ".top_names"
RESULTS, ATLAS = "reductions.npz", "atlas.html"
TARGET_BYTES = 64 * 2**20  # of a batch's results
TEXT_REQUESTS = 16  # of a batch of texts, which are sorted by length


@dataclass(frozen=True)
class Job:
    """A question, its source and the folder for results; ``file`` is the final merged file, if any.

    ``columns``: of a table source; ``names``: of the results' columns, in place of their layers'.
    """

    question: Question
    source: str
    folder: Path
    file: Path | None
    layout: str
    columns: Columns = ALL_DEFAULT
    names: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        question: Question,
        source: str,
        out: Path,
        layout: str | None,
        columns: Columns = ALL_DEFAULT,
        names: tuple[str, ...] = (),
    ) -> Job:
        """A job whose ``out`` is a file if its name ends in ``.parquet``, and else a folder; LayertapError."""
        if question.other and not question.compares:
            raise LayertapError("--compare and --compare-layers are for --reduce cka", hint="leave them out")
        if question.reduce:
            _check_reductions(question, out, layout, names)
            return cls(question, source, out, None, REDUCED, columns, names)
        if out.suffix != ".parquet":
            return cls(question, source, out, None, layout or "parquet", columns, names)
        if layout == "safetensors":
            raise LayertapError(f"{layout} is for a folder", hint=f"write --out {out.with_suffix('')}")
        parts = out.with_name(out.name + PARTS)
        return cls(question, source, parts, out, layout or "parquet", columns, names)

    def describe(self) -> dict[str, Any]:
        """The job as plain data."""
        source = os.path.abspath(self.source)  # noqa: PTH100  (a pattern is no path)
        columns = {**asdict(self.columns), "keep": list(self.columns.keep), "as": list(self.names)}
        return {**self.question.describe(), "source": source, **columns, "layout": self.layout}

    def find_begun(self) -> Manifest | None:
        """The manifest of the existing output, perhaps another job's; LayertapError for files that no job wrote."""
        if self.file is not None and self.file.exists():
            return _read_file(self.file)
        begun = Manifest.read(self.folder)
        just_begun = (LOCK, f"{NAME}.tmp")  # left if a job was killed at its very start
        if (
            begun is None
            and self.folder.exists()
            and any(path.name not in just_begun for path in self.folder.iterdir())
        ):
            raise LayertapError(f"{self.folder} has other files in it", hint="choose another --out")
        return begun

    def list_tables(self) -> list[Path]:
        """The tables that have a row for each input, in order."""
        return [self.file] if self.file is not None and self.file.exists() else list_parts(self.folder)


def _check_reductions(question: Question, out: Path, layout: str | None, names: Sequence[str]) -> None:
    """LayertapError if a reduction is unknown or named twice, or other options do not fit reductions."""
    if unmergeable := [name for name in question.reduce if name in UNMERGEABLE]:
        detail = f"{unmergeable[0]} of all inputs can't be made of its values for blocks of them"
        hint = "send some hundred inputs to POST /compare, or write vectors, without --reduce, and compute it of these"
        raise LayertapError(detail, hint=hint)
    if unknown := [name for name in question.reduce if name not in REDUCTIONS]:
        raise LayertapError(f"there is no reduction {escape(unknown[0])}", hint=f"one of: {', '.join(REDUCTIONS)}")
    if len(set(question.reduce)) < len(question.reduce):
        raise LayertapError("a reduction is named twice", hint="name each once")
    if not question.layers:
        raise LayertapError("reductions are of layers", hint="add --layers")
    if question.compares and len(question.reduce) > 1:
        raise LayertapError("cka is of layers, other reductions are of channels", hint="make them in two jobs")
    if layout or names or ((question.pool or question.normalize) and not question.compares):
        reason = "--pool, --normalize, --format or --as: reductions are of all values, by channel"
        unfit = "--format or --as: it writes no vectors" if question.compares else reason
        raise LayertapError(f"--reduce takes no {unfit}", hint="leave them out")
    if out.suffix:
        raise LayertapError("reductions are written to a folder", hint=f"write --out {out.with_suffix('')}")


@dataclass(frozen=True)
class Summary:
    """The number of rows and of errors, and whether the job was complete before."""

    rows: int
    errors: int
    before: bool


class Observer(Protocol):
    """Shows the progress of a job."""

    def wait_for_model(self) -> None:
        """The model is asked for the outline of its answers, and may have to be loaded first."""

    def note_ready(self, model: str) -> None:
        """The model has answered."""

    def start(self, rows: int, errors: int, count: Callable[[], int | None]) -> None:
        """Begin after ``rows`` rows, ``errors`` of them without a result.

        ``count`` gives the number of all rows, and may take long.
        """

    def advance(self, rows: Rows) -> None:
        """A batch was answered."""


async def run(
    job: Job,
    source: Source,
    create: Callable[[], Extractor],
    observer: Observer,
    *,
    restart: bool = False,
    atlas: bool = False,
) -> Summary:
    """Answer the remaining inputs; LayertapError. ``restart`` removes existing output first.

    ``atlas``: also write a page of the reductions, even if the job was complete before.

    ``create`` makes the extractor, after all other checks.
    """
    await asyncio.to_thread(import_parquet)  # takes a second, which would delay batches later
    begun = job.find_begun()
    if begun is not None and not restart:
        begun.check_same(job.describe())
    if next(source.iterate(1, 0), None) is None:
        raise LayertapError(f"there is nothing in {job.source}")
    complete = begun is not None and begun.complete and not restart
    if complete:
        entries = source.iterate(sys.maxsize, 0)
        await asyncio.to_thread(check_keys, entries, job.list_tables(), complete=True)
    extractor = create()
    try:
        observer.wait_for_model()
        outline = (await extractor.outline(job.question)).rename(job.names)
        observer.note_ready(outline.model)
        _check_outline(job, outline, source)
        if begun is not None and restart:  # only once the model has answered: the old output may have taken a night
            _remove(job, begun)
            begun = job.find_begun()
        elif begun is not None:
            check_same_model(begun.outline, outline)
        if not complete:
            await _go_on(job, source, extractor, outline, begun, observer)
    finally:
        await extractor.close()
    if job.file is not None and job.folder.exists():
        _clear(job.folder)
    if atlas:
        await asyncio.to_thread(_write_atlas, job, source, outline, extractor.max_input_bytes)
    rows, errors = await asyncio.to_thread(count_rows, job.list_tables())
    return Summary(rows, errors, complete)


async def _go_on(
    job: Job, source: Source, extractor: Extractor, outline: Outline, begun: Manifest | None, observer: Observer
) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(job.folder):
        if job.find_begun() != begun:
            raise LayertapError(f"another process has written to {job.folder}", hint="enter the command again")
        if begun is None:
            # Texts are sorted by length within several requests, which would change the blocks that a comparison sums.
            several = job.question.texts and not job.question.compares
            most = extractor.max_rows * (TEXT_REQUESTS if several else 1)
            rows = max(1, min(most, TARGET_BYTES // max(outline.row_bytes, 1)))
            begun = Manifest(job.describe(), outline, BatchLimits(rows, extractor.max_batch_bytes))
            begun.save(job.folder)
        parts = await asyncio.to_thread(find_parts, job.folder)
        first, errors = await asyncio.to_thread(count_rows, parts)
        entries = source.iterate(first, extractor.max_input_bytes)
        await asyncio.to_thread(check_keys, entries, parts)
        observer.start(first, errors, source.count)
        batches = cut_batches(entries, begun.limits)
        reducer = _make_reducer(begun, job, parts)
        writer = PartWriter(job.folder, begun.outline, job.layout, first, reducer, source.kept)
        await write_rows(answer_batches(batches, extractor, job.question, begun.outline), writer, observer.advance)
        await asyncio.to_thread(_finish, job, begun, writer.reducer)


def _make_reducer(manifest: Manifest, job: Job, parts: Sequence[Path]) -> Reducer | None:
    """A reducer with the saved state of earlier parts; None if the job has no reductions. LayertapError."""
    if job.layout != REDUCED:
        return None
    columns = {key: receipt["stats"] for key, receipt in manifest.outline.receipts.items()}
    reducer = Reducer(job.question.reduce, job.question.top, columns)
    if parts:
        reducer.load(read_state(parts[-1]))
    return reducer


def _check_outline(job: Job, outline: Outline, source: Source) -> None:
    """LayertapError if answers can't be compared, or do not fit the layout."""
    if outline.fingerprint.startswith(UNREPEATABLE):
        raise LayertapError(
            f"model {outline.model} is not deterministic: no two of its vectors can be compared",
            hint="find in its code what draws random numbers outside of training",
        )
    check_columns(outline, job.layout, source.kept)
    channels = sum(column.shape[0] for column in outline.columns.values())
    if "covariance" in job.question.reduce and channels > MAX_COVARIANCE:
        raise LayertapError(
            f"the covariance of {channels} channels is too large, the limit is {MAX_COVARIANCE}",
            hint="name fewer layers, or leave 'covariance' out of --reduce",
        )


def _finish(job: Job, manifest: Manifest, reducer: Reducer | None) -> None:
    """Write the final output from the parts."""
    if reducer is not None:
        arrays = reducer.finish()
        compared = manifest.outline.receipts.get(HSIC, {})
        arrays |= {name: np.array(each) for name, each in compared.items() if name.startswith(CKA)}
        strongest = {key: array for key, array in arrays.items() if key.endswith(TOP_INPUTS)}
        names = name_inputs(chain.from_iterable(array.flat for array in strongest.values()), list_parts(job.folder))
        for key, array in strongest.items():
            named = [names[number] for number in array.flat]
            arrays[key.removesuffix(TOP_INPUTS) + TOP_NAMES] = np.array(named).reshape(array.shape)
        with replace_file(job.folder / RESULTS) as temporary:
            temporary.write_bytes(b"".join(encode_arrays(dict(sorted(arrays.items())))))
    if job.file is None:
        replace(manifest, complete=True).save(job.folder)
        for path in list_states(job.folder) if reducer is not None else ():
            path.unlink()
        return
    outline = manifest.outline
    metadata = {  # ``layertap check`` reads it
        "model": outline.model,
        "fingerprint": outline.fingerprint,
        "space": outline.space,
        "receipts": orjson.dumps(outline.receipts_by_column).decode(),
        "question": orjson.dumps(manifest.question).decode(),
    }
    merge_parts(list_parts(job.folder), job.file, metadata, outline.row_bytes)


def _write_atlas(job: Job, source: Source, outline: Outline, max_bytes: int) -> None:
    with np.load(job.folder / RESULTS, allow_pickle=False) as file:
        arrays = dict(file)
    inputs = sum(len(keys) for keys in (read_column(table, "key") for table in job.list_tables()))
    page = make_atlas(arrays, outline, source, inputs, max_bytes)
    with replace_file(job.folder / ATLAS) as temporary:
        temporary.write_bytes(page)


def _read_file(file: Path) -> Manifest:
    """The manifest in a complete job's file; LayertapError if no job wrote the file."""
    try:
        facts = {name.decode(): value for name, value in import_parquet().read_schema(file).metadata.items()}
        outline = Outline(facts["model"].decode(), facts["fingerprint"].decode(), {}, {})
        question = {"layout": "parquet", **json.loads(facts["question"])}
        return Manifest(question, outline, BatchLimits(0, 0), complete=True)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        raise LayertapError(f"{file} is there already, and none of ours", hint="choose another --out") from None


def _remove(job: Job, begun: Manifest) -> None:
    """Remove what a job has written, and nothing else."""
    if job.folder.exists():
        replace(begun, complete=False).save(job.folder)  # if interrupted here, the job resumes as incomplete
        _clear(job.folder)
    if job.file is not None:
        job.file.unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """Remove a job's files from a folder, and the folder if it is empty then.

    The last part goes first and the manifest last, so that an interrupted removal leaves a valid job.
    """
    with lock_folder(folder):
        for pattern in ("part-*", f"{RESULTS}*", f"{ATLAS}*", f"{NAME}*"):
            for path in sorted(folder.glob(pattern), reverse=True):
                path.unlink()
    (folder / LOCK).unlink()
    with suppress(OSError):
        folder.rmdir()
