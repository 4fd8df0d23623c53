"""Readings of what forwards take in time, kept from load to load: one that noise fooled is outvoted by the others."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from layertap.models.devices.costs import ForwardSeconds
from layertap.models.json_file import DAMAGED, parse_figures, read_json, write_json

log = logging.getLogger("layertap")
MAX_READINGS = 9  # of a model: the newest
MAX_FILES = 1000  # in a folder
RECIPE = 1  # to be raised where seconds are measured otherwise


class CostHistory:
    """The newest readings of one model on one kind of processor, in a JSON file; without a path none are kept.

    A file that can't be read or written costs nothing but the readings of other loads.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, reading: ForwardSeconds) -> Sequence[ForwardSeconds]:
        """A reading after those before it, kept with them."""
        if self._path is None:
            return [reading]
        try:
            readings = [*self._read(self._path), reading][-MAX_READINGS:]
            self._write(self._path, readings)
        except OSError as error:
            log.info("readings of costs are not kept", extra={"fields": {"reason": type(error).__name__}})
            return [reading]
        return readings

    def _read(self, path: Path) -> list[ForwardSeconds]:
        """What is kept: nothing where a file is damaged; OSError where it can't be read, and must not be replaced."""
        try:
            entries = read_json(path)
            if not isinstance(entries, list):
                raise TypeError("this is no list")
            return [_parse_reading(entry) for entry in entries]
        except FileNotFoundError:
            return []
        except DAMAGED as error:
            log.info("readings of costs are not used", extra={"fields": {"reason": type(error).__name__}})
            return []

    def _write(self, path: Path, readings: Sequence[ForwardSeconds]) -> None:
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _remove_oldest(folder)
        write_json(path, [asdict(each) for each in readings])


def open_history(folder: Path | None, *parts: object) -> CostHistory:
    """The history in a folder (None: nowhere) of what these parts say: all that a forward's time depends on."""
    if folder is None:
        return CostHistory(None)
    text = json.dumps([RECIPE, *parts], default=str)
    return CostHistory(folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def _parse_reading(entry: object) -> ForwardSeconds:
    return ForwardSeconds(**parse_figures(entry, [field.name for field in fields(ForwardSeconds)]))


def _remove_oldest(folder: Path) -> None:
    """Make room for one more file; each is written anew whenever it is used."""
    with suppress(FileNotFoundError):  # another process may remove them too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: max(len(files) - MAX_FILES + 1, 0)]:
            file.unlink()
