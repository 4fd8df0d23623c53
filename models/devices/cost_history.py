"""Readings of what forwards take, kept from start to start: one that noise fooled is outvoted by the others."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import NamedTemporaryFile

from layertap.models.catalog.catalog import Costs
from layertap.models.devices.costs import combine_costs

log = logging.getLogger("layertap")
MAX_READINGS = 9  # of a model; then none is taken any more, and how many threads a row gets does not change
MAX_FILES = 1000  # in a folder
RECIPE = 1  # to be raised where costs are measured otherwise


class CostHistory:
    """The readings of one model on one kind of processor, in a JSON file; without a path none are kept.

    A file that can't be read or written costs nothing but the readings of other starts.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def update(self, measure: Callable[[], Costs]) -> Costs:
        """What all readings say together, after one more where there are few."""
        readings = self._read()
        if len(readings) < MAX_READINGS:
            readings.append(measure())
            self._write(readings)
        return combine_costs(readings)

    def _read(self) -> list[Costs]:
        if self._path is None:
            return []
        try:
            return [_parse_reading(entry) for entry in json.loads(self._path.read_bytes())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.info("readings of costs are not used", extra={"fields": {"reason": type(error).__name__}})
            return []

    def _write(self, readings: list[Costs]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_oldest(self._path.parent)
            with NamedTemporaryFile("w", dir=self._path.parent, suffix=".part", delete=False) as file:
                json.dump([asdict(reading) for reading in readings], file)
            Path(file.name).replace(self._path)
        except OSError as error:
            log.info("readings of costs are not kept", extra={"fields": {"reason": type(error).__name__}})


def open_history(folder: Path | None, *parts: object) -> CostHistory:
    """The history in a folder (None: nowhere) of what these parts say: all that a forward's time depends on."""
    if folder is None:
        return CostHistory(None)
    text = json.dumps([RECIPE, *parts], default=str)
    return CostHistory(folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def _parse_reading(entry: object) -> Costs:
    """A reading from a file; ValueError, TypeError where it is none."""
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(Costs)}:
        raise ValueError("this is no reading")
    base, per_row, speedup = (float(entry[name]) for name in ("base", "per_row", "speedup"))
    row_bytes = int(entry["row_bytes"])
    if not all(map(math.isfinite, (base, per_row, speedup))) or min(base, row_bytes) < 0 or min(per_row, speedup) <= 0:
        raise ValueError("a figure is none that was measured")
    return Costs(base, per_row, row_bytes, speedup)


def _remove_oldest(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    if len(files) >= MAX_FILES:
        with suppress(FileNotFoundError):
            min(files, key=lambda file: file.stat().st_mtime).unlink()
