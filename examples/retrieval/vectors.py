"""Vectors that ``layertap bulk`` wrote, and more of the same kind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class RefusedError(Exception):
    """What was asked can't be done; the message says what can."""


@dataclass(frozen=True)
class Embedded:
    """Unit vectors (N, C), float32, and the names (N) of the pictures that they are of."""

    keys: list[str]
    vectors: Vectors
    fingerprint: str


@dataclass(frozen=True)
class VectorFile:
    """A Parquet file of ``layertap bulk``: which question it answers, about which pictures, by which model.

    ``column`` is the one that has the vectors; ``options`` say who embeds more of their kind, ``--url URL`` or
    ``--config FILE``.
    """

    path: Path
    column: str
    model: str
    fingerprint: str
    question: dict[str, Any]
    options: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, column: str | None = None, options: Sequence[str] = ()) -> VectorFile:
        """Read what a file says of itself; RefusedError. ``column`` chooses among several."""
        schema, facts = _read_head(path)
        columns = [field.name for field in schema if pa.types.is_fixed_size_list(field.type)]
        if column is None and len(columns) == 1:
            (column,) = columns
        if column not in columns:
            raise RefusedError(f"{path} has vectors of {', '.join(columns) or 'nothing'}: choose one with --column")
        return cls(path, column, facts[b"model"], facts[b"fingerprint"], json.loads(facts[b"question"]), tuple(options))

    def read(self) -> Embedded:
        """All vectors, and no pictures that have none; RefusedError where they are of several fingerprints."""
        self.check_fingerprints()
        table = pq.read_table(self.path, columns=["key", self.column])
        table = table.filter(table.column(self.column).is_valid())
        vectors = np.stack(table.column(self.column).to_numpy()) if len(table) else np.empty((0, 0))
        return Embedded(table.column("key").to_pylist(), normalize(vectors), self.fingerprint)

    def check_fingerprints(self) -> None:
        """RefusedError where rows were made by something else than the file says."""
        rows = pq.read_table(self.path, columns=["fingerprint"]).column(0)
        if others := set(rows.unique().to_pylist()) - {self.fingerprint, None}:
            self.refuse(f"has vectors of fingerprint {self.fingerprint} and of {', '.join(sorted(others))}")

    def embed(self, pictures: Sequence[Path]) -> Embedded:
        """Ask of these pictures what the file's were asked, by ``layertap bulk``.

        RefusedError where a picture can't be used, and where who answers now is another than who made the file: such
        vectors can't be compared.
        """
        with TemporaryDirectory() as folder:
            names, out = Path(folder, "pictures.txt"), Path(folder, "vectors.parquet")
            names.write_text("".join(f"{picture.absolute()}\n" for picture in pictures), encoding="utf-8")
            command = [*self.make_command(str(names), out), "--strict"]
            run = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", check=False)
            if run.returncode:
                raise RefusedError(run.stderr.strip())
            now = _read_head(out)[1][b"fingerprint"]
            if now != self.fingerprint:
                self.refuse(f"was made with fingerprint {self.fingerprint}, and this model now has {now}")
            return VectorFile.open(out, self.column).read()

    def refuse(self, reason: str) -> None:
        """RefusedError, with the command that makes all vectors anew."""
        column = ["--column", self.question["column"]] if self.question.get("column") else []
        command = [*self.make_command(self.question["source"], self.path), *column, "--restart"]
        raise RefusedError(
            f"{self.path} {reason}: such vectors can't be compared. This embeds its pictures again:\n"
            f"{shlex.join(command)}"
        )

    def make_command(self, source: str, out: Path) -> list[str]:
        """The command that asks the same of other pictures."""
        asked = self.question
        here = Path(sys.executable).is_relative_to(Path.cwd())
        return [
            os.path.relpath(sys.executable) if here else sys.executable,
            *("-m", "layertap", "bulk", source, "--model", self.model),
            *(("--layers", ",".join(asked["layers"])) if asked["layers"] else ()),
            *(("--pool", asked["pool"]) if asked["pool"] else ()),
            *(("--normalize",) if asked["normalize"] else ()),
            *("--out", str(out)),
            *self.options,
        ]

    def find_picture(self, key: str) -> Path | None:
        """The file of a picture, None where it is in an archive or a table, or gone."""
        source = Path(self.question["source"])
        path = source / key if source.is_dir() else Path(key)
        return path if path.is_file() and source.suffix not in (".parquet", ".tar") else None


def _read_head(path: Path) -> tuple[pa.Schema, dict[bytes, str]]:
    """The columns of a file, and what it says of them."""
    try:
        schema = pq.read_schema(path)
        return schema, {name: schema.metadata[name].decode() for name in (b"model", b"fingerprint", b"question")}
    except (OSError, KeyError, TypeError, pa.ArrowInvalid):
        raise RefusedError(f"{path} is no file of vectors: make one with `layertap bulk FOLDER --out {path}`") from None


def normalize(vectors: NDArray[Any]) -> Vectors:
    """Make each row of length 1, but one of zeros."""
    rows = np.asarray(vectors, np.float32)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Vectors = rows / np.where(length > 0, length, 1)
    return unit
