"""Small JSON files of figures that processes share: read with care, there whole or not at all."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

MAX_FILE_BYTES = 2**16
DAMAGED = (ValueError, TypeError, ArithmeticError, RecursionError)  # what reading or parsing a damaged file raises


def read_json(path: Path) -> object:
    """What a file holds; OSError where it can't be read, one of ``DAMAGED`` where it is no JSON of a bearable size."""
    if path.exists() and not path.is_file():  # a pipe would have whoever reads it wait for whoever writes to it
        raise OSError("it is no regular file")
    with path.open("rb") as file:
        return json.loads(file.read(MAX_FILE_BYTES))


def write_json(path: Path, value: object) -> None:
    """Write a file anew; OSError where it can't be written."""
    folder = path.parent
    with NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            json.dump(value, file)
            file.flush()
            part.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)  # others share a folder that is theirs too
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def parse_figures(entry: object, names: Iterable[str]) -> dict[str, float]:
    """Measured figures by name, just these names; one of ``DAMAGED`` where an entry is something else."""
    if not isinstance(entry, dict) or entry.keys() != (expected := set(names)):
        raise ValueError("these are no such figures")
    figures = {name: float(entry[name]) for name in expected}
    if not all(math.isfinite(figure) and figure > 0 for figure in figures.values()):
        raise ValueError("a figure is none that was measured")
    return figures
