"""Readings of what forwards take in time, kept from load to load: one that noise fooled is outvoted by the others."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import NamedTemporaryFile

from layertap.models.devices.costs import ForwardSeconds

log = logging.getLogger("layertap")
MAX_READINGS = 9  # of a model: the newest
MAX_FILES = 1000  # in a folder
MAX_FILE_BYTES = 2**16
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
        if path.exists() and not path.is_file():  # a pipe would have the model's thread wait for whoever writes to it
            raise OSError("it is no regular file")
        try:
            with path.open("rb") as file:
                return [_parse_reading(entry) for entry in json.loads(file.read(MAX_FILE_BYTES))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            log.info("readings of costs are not used", extra={"fields": {"reason": type(error).__name__}})
            return []

    def _write(self, path: Path, readings: Sequence[ForwardSeconds]) -> None:
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _remove_oldest(folder)
        with NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                json.dump([asdict(each) for each in readings], file)
                file.flush()
                part.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)  # others share a folder that is theirs too
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise


def open_history(folder: Path | None, *parts: object) -> CostHistory:
    """The history in a folder (None: nowhere) of what these parts say: all that a forward's time depends on."""
    if folder is None:
        return CostHistory(None)
    text = json.dumps([RECIPE, *parts], default=str)
    return CostHistory(folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def _parse_reading(entry: object) -> ForwardSeconds:
    """A reading from a file; ValueError, TypeError, ArithmeticError where it is none."""
    names = [field.name for field in fields(ForwardSeconds)]
    if not isinstance(entry, dict) or entry.keys() != set(names):
        raise ValueError("this is no reading")
    figures = {name: float(entry[name]) for name in names}
    if not all(math.isfinite(figure) and figure > 0 for figure in figures.values()):
        raise ValueError("a figure is none that was measured")
    return ForwardSeconds(**figures)


def _remove_oldest(folder: Path) -> None:
    """Make room for one more file; each is written anew whenever it is used."""
    with suppress(FileNotFoundError):  # another process may remove them too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: max(len(files) - MAX_FILES + 1, 0)]:
            file.unlink()
