"""Features of pictures on disk, a batch at a time. Imports torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.models.selection.hook_points import Selector
from layertap.models.spec import PreprocessSpec
from layertap.service.cli.console import show_status, stderr
from layertap.service.engine.collect.joined_inputs import ANOTHER_SHAPE
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.engine.rows.rows import get_preprocessing
from layertap.service.explain.prober import Prober
from layertap.service.features import Features, join_features
from layertap.service.inputs.files import FileError, read_regular_file
from layertap.service.inputs.items import ImageItem
from layertap.service.pictures.overlay import SentPicture

MAX_BATCH_FILES = 32
DEADLINE_S = 3600


async def extract_shown(
    engine: Engine, file: Path, selectors: tuple[Selector, ...], model: str | None, reserved: frozenset[str]
) -> tuple[Features, SentPicture | None]:
    """As ``extract_files`` of one picture, and that picture, to be drawn beside what layers make of it.

    None in its place where it is not known which part of it a model sees.
    """
    try:
        with show_status("loading the model"):
            handle = await engine.manager.get_handle(model, float("inf"))
            spec = get_preprocessing(handle.model.model_inputs)
    except BaseException:
        await engine.close()
        raise
    features = await extract_files(engine, [file], selectors, model, reserved)
    if not isinstance(spec, PreprocessSpec):
        return features, None
    return features, SentPicture(read_regular_file(file), spec, engine.settings.max_pixels)


async def extract_files(
    engine: Engine,
    files: Sequence[Path],
    selectors: tuple[Selector, ...],
    model: str | None,
    reserved: frozenset[str],
) -> Features:
    """The features of all pictures that can be read, with a bar where it takes long; the others are named on stderr.

    The engine is closed. No result may have one of the names in ``reserved``. LayertapError where no picture is left.
    """
    limits = engine.settings
    size = min(MAX_BATCH_FILES, limits.max_inputs, limits.max_queue_rows)
    parts: list[Features] = []
    faults: list[Fault] = []
    try:
        with show_status("loading the model"):
            handle = await engine.manager.get_handle(model, float("inf"))
            get_preprocessing(handle.model.model_inputs)
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            bar = progress.add_task("extracting", total=len(files))
            for start in range(0, len(files), size):
                places = range(start, min(start + size, len(files)))
                request = _make_request(files, places, selectors, model, reserved)
                part, batch_faults = await _extract_batch(engine, request, parts[0] if parts else None)
                parts += [part] if part else []
                faults += batch_faults
                for fault in batch_faults:
                    name = _format_path(files[fault.input or 0])
                    stderr.print(f"{name}: {fault.detail}", markup=False, soft_wrap=True)
                progress.advance(bar, len(places))
        if parts:
            probed = replace(request, items=())
            with engine.admission.admit(time.monotonic() + DEADLINE_S) as ticket:
                parts[0] = await Prober(engine).add_probes(parts[0], probed, ticket)
    finally:
        await engine.close()
    if not parts:
        raise LayertapError("nothing could be extracted")
    features = replace(join_features(parts), errors=tuple(faults))
    names = tuple(_format_path(path) for place, path in enumerate(files) if place not in features.skipped)
    return replace(features, files=names)


def _make_request(
    files: Sequence[Path],
    places: Iterable[int],
    selectors: tuple[Selector, ...],
    model: str | None,
    reserved: frozenset[str],
) -> ExtractRequest:
    """A request for the pictures at some places; it carries the faults of files that can't be read."""
    items, faults = [], []
    for place in places:
        try:
            items.append((place, ImageItem(read_regular_file(files[place]))))
        except FileError as error:
            faults.append(Fault(str(error), pointer=f"/inputs/{place}", input=place))
    return ExtractRequest(
        model=model,
        items=tuple(items),
        selectors=selectors,
        on_error="skip",
        faults=tuple(faults),
        isolated=True,  # the same bits every time
        reply=ReplyOptions(reserved=reserved, by_input=False),  # a file may be as large as the disk holds
    )


async def _extract_batch(
    engine: Engine, request: ExtractRequest, first: Features | None
) -> tuple[Features | None, tuple[Fault, ...]]:
    """The features of a batch, None where not one of its pictures can be used, and the faults of those that can't.

    ``first`` are the features of the first batch, if there was one: results have to have the same shape.
    """
    if not request.items:
        return None, request.faults
    try:
        with engine.admission.admit(time.monotonic() + DEADLINE_S) as ticket:
            part = await engine.extract(request, ticket)
    except RequestError as error:
        if not error.faults or any(fault.input is None for fault in error.faults):
            raise
        return None, error.faults
    if first is None or _list_row_shapes(part) == _list_row_shapes(first):
        return part, part.errors
    places = [place for place, _ in request.items if place not in part.skipped]
    return None, (*part.errors, *(Fault(ANOTHER_SHAPE, input=place) for place in places))


def _list_row_shapes(features: Features) -> dict[str, list[int]]:
    """The shapes of results without the axis of the rows."""
    return {
        key: [size for axis, size in enumerate(array.shape) if axis != features.receipts[key].row_axis]
        for key, array in features.arrays.items()
    }


def _format_path(path: Path) -> str:
    """A file's name as text; bytes that are none are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
