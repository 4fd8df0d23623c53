"""What a job has written down of itself: the question, and what answers are like. It begins a job and ends it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layertap.models.errors import LayertapError
from layertap.service.bulk.entries import BatchLimits
from layertap.service.bulk.job import Column, Outline, Question

FORMAT = 1
NAME = "manifest.json"
LOCK = ".lock"
OTHERWISE = "choose another --out, or add --restart to begin anew"


@dataclass(frozen=True)
class Manifest:
    """A job: what is asked of which source, what answers are like, how pictures are batched, whether all are there."""

    question: Question
    source: str
    column: str | None
    outline: Outline
    limits: BatchLimits
    layout: str
    complete: bool = False

    def check_same(self, asked: Mapping[str, Any], layout: str) -> None:
        """LayertapError where what a job asks now is not what it was begun with."""
        begun = {**self.question.describe(), "source": self.source, "column": self.column, "layout": self.layout}
        for name, value in {**asked, "layout": layout}.items():
            before = begun[name]
            if value != before and not (name == "model" and value in (None, self.outline.model)):
                raise LayertapError(
                    f"what is there was made with {name} {before}, and now it is to be {value}", hint=OTHERWISE
                )

    def check_outline(self, outline: Outline) -> None:
        """LayertapError where answers are not what they were."""
        if (outline.model, outline.fingerprint) != (self.outline.model, self.outline.fingerprint):
            raise LayertapError(
                f"what is there was made by {self.outline.model} with fingerprint {self.outline.fingerprint}, and now "
                f"{outline.model} has {outline.fingerprint}: the vectors can't be compared",
                hint=OTHERWISE,
            )

    def save(self, folder: Path) -> None:
        """Write it, all or nothing."""
        write_atomically(folder / NAME, json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode())

    def finish(self, folder: Path) -> None:
        """Write that all pictures are there."""
        replace(self, complete=True).save(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The one in a folder, None where there is none; LayertapError."""
        try:
            return cls._parse(json.loads((folder / NAME).read_bytes()))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise LayertapError(f"{folder / NAME} can't be read", hint=OTHERWISE) from error

    @classmethod
    def _parse(cls, document: dict[str, Any]) -> Manifest:
        if document.pop("format") != FORMAT:
            raise LayertapError("what is there was made by another version of layertap", hint=OTHERWISE)
        question, outline = document["question"], document["outline"]
        columns = {
            name: Column(tuple(column["shape"]), column["dtype"]) for name, column in outline.pop("columns").items()
        }
        return cls(
            question=Question(**question | {"layers": tuple(question["layers"])}),
            source=document["source"],
            column=document["column"],
            outline=Outline(**outline, columns=columns),
            limits=BatchLimits(**document["limits"]),
            layout=document["layout"],
            complete=document["complete"],
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, whatever happens."""
    with replace_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A name to write to: once that is done the file is on the disk, and has the name that it is to have."""
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the disk keep which files a folder has."""
    with suppress(OSError):  # not on Windows
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out as long as the block runs; LayertapError where one is in."""
    with (folder / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on Windows
            pass
        except OSError:
            raise LayertapError(f"another process writes to {folder}", hint="wait for it, or end it") from None
        yield
