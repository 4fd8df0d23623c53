"""Features of pictures on disk, a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.progress import Progress

import layertap_client as lt
from layertap.models.errors import Fault, LayertapError
from layertap.service.cli.console import stderr, tell
from layertap.service.features import Features, Receipt, join_features
from layertap.service.formats.reply_format import check_names
from layertap.service.inputs.files import FileError, read_regular_file

MAX_BATCH_FILES = 32
BODY_SHARE = 0.9  # of a server's limit; the rest is for what stands around pictures
ANOTHER_SHAPE = "its results have another shape than the first"
RECEIPTS = TypeAdapter(dict[str, Receipt])
Batch = dict[int, bytes]  # pictures by their indices


@dataclass
class FileExtraction:
    """Pictures on disk, and what was made of them so far; ``options`` are those of ``AsyncClient.extract``.

    No result may have one of the names in ``reserved``.
    """

    client: lt.AsyncClient
    files: Sequence[Path]
    layers: Sequence[str]
    options: Mapping[str, Any]
    reserved: frozenset[str]
    parts: list[Features] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    async def run(self) -> Features:
        """The features of all pictures that can be read, with a bar where it takes long; the others are named.

        LayertapError where no picture is left.
        """
        limits = (await self.client.models()).limits
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            bar = progress.add_task("extracting", total=len(self.files))
            for batch in self._read(limits):
                await self._extract(batch)
                progress.update(bar, completed=max(batch) + 1)
        if not self.parts:
            raise LayertapError("nothing could be extracted")
        await self._add_probes()
        faults = tuple(sorted(self.faults, key=lambda fault: fault.input or 0))
        features = replace(join_features(self.parts), errors=faults)
        indices = set(range(len(self.files))) - set(features.skipped)
        return replace(features, files=tuple(_format_path(self.files[index]) for index in sorted(indices)))

    def _read(self, limits: Mapping[str, float]) -> Iterator[Batch]:
        """The pictures in batches that a server takes; those that can't be read, or are too large, are named."""
        rows = int(min(MAX_BATCH_FILES, limits["max_inputs"], limits["max_queue_rows"]))
        max_bytes = int(limits["max_body_bytes"])  # a picture alone is the body
        batch: Batch = {}
        nbytes = 0
        for start in range(0, len(self.files), rows):
            for index, path in enumerate(self.files[start : start + rows], start):
                try:
                    data = read_regular_file(path, max_bytes)
                except FileError as error:
                    self._leave_out(index, str(error))
                    continue
                if batch and nbytes + len(data) > max_bytes * BODY_SHARE:
                    yield batch
                    batch, nbytes = {}, 0
                batch[index] = data
                nbytes += len(data)
            if batch:
                yield batch
            batch, nbytes = {}, 0

    async def _extract(self, batch: Batch) -> None:
        """Take a batch; in halves where it is too much for one reply, or not every bad picture of it is named."""
        try:
            # Isolated: the same bits every time.
            result = await self.client.extract(
                list(batch.values()),
                self.layers,
                **self.options,
                on_error="skip",
                isolated=True,
            )
        except (lt.TooLargeError, lt.InvalidRequestError) as error:
            faults = {fault.input: fault for fault in error.faults if fault.input is not None}
            if len(faults) == len(batch):
                await self._check_pictures(error)
                self._leave_out_all(batch, faults.values())
            elif len(batch) > 1 and (isinstance(error, lt.TooLargeError) or faults or error.more_faults):
                await self._extract_halves(batch)
            else:
                raise
            return
        if others := _find_others(result):
            indices = [index for number, index in enumerate(batch) if number in others]
            for index in indices:
                self._leave_out(index, ANOTHER_SHAPE)
            await self._extract({index: data for index, data in batch.items() if index not in indices})
            return
        self._leave_out_all(batch, result.errors)
        features = _make_features(result)
        check_names(features.arrays, self.reserved)
        if self.parts and _list_row_shapes(features) != _list_row_shapes(self.parts[0]):
            for number, index in enumerate(batch):
                if number not in result.skipped:
                    self._leave_out(index, ANOTHER_SHAPE)
        else:
            self.parts.append(features)

    async def _check_pictures(self, error: lt.ProblemError) -> None:
        """Raise an error that is not the pictures' own: the model takes none."""
        model = await self.client.model(self.options["model"])
        if model.details.get("preprocess", "not known yet") is None:
            raise error

    async def _add_probes(self) -> None:
        """Give the receipts of the first part, which are those of all, their probes."""
        options = {**self.options, "model": self.parts[0].model}
        probed = RECEIPTS.validate_python((await self.client.probe(self.layers, **options))["receipts"])
        receipts = {
            key: replace(receipt, probe=probed[key].probe if key in probed else None)
            for key, receipt in self.parts[0].receipts.items()
        }
        self.parts[0] = replace(self.parts[0], receipts=receipts)

    async def _extract_halves(self, batch: Batch) -> None:
        indices = list(batch)
        middle = len(indices) // 2
        for half in (indices[:middle], indices[middle:]):
            await self._extract({index: batch[index] for index in half})

    def _leave_out_all(self, batch: Batch, faults: Any) -> None:
        indices = list(batch)
        for fault in faults:
            if fault.input is not None:
                self._leave_out(indices[fault.input], fault.detail, fault.hint)

    def _leave_out(self, index: int, reason: str, hint: str = "") -> None:
        """Name a picture that has no row."""
        self.faults.append(Fault(reason, hint, f"/inputs/{index}", index))
        tell(f"{_format_path(self.files[index])}: {reason}")


def _make_features(result: lt.Result) -> Features:
    return Features(
        model=result.model,
        fingerprint=result.fingerprint,
        rows=result.rows,
        arrays=dict(result.arrays),
        receipts=RECEIPTS.validate_python(result.receipts),
        warnings=result.warnings,
    )


def _find_others(result: lt.Result) -> set[int]:
    """The inputs, by their indices, whose results have another shape than those of the first one."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, array in result.items():
        key, _, number = name.rpartition(".input")
        if number.isdecimal() and name != result.receipts[name]["layer"]:  # no layer's own name, but an input's
            shapes.setdefault(int(number), {})[key] = array.shape
    first = shapes[min(shapes)] if shapes else {}
    return {number for number, each in shapes.items() if each != first}


def _list_row_shapes(features: Features) -> dict[str, list[int]]:
    """The shapes of results without the axis of the rows."""
    return {
        key: [size for axis, size in enumerate(array.shape) if axis != features.receipts[key].row_axis]
        for key, array in features.arrays.items()
    }


def _format_path(path: Path) -> str:
    """A file's name as text; bytes that are none are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
