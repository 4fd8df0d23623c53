"""A job's manifest: its question and the outline of its answers. Written first, and updated at the end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from layertap.models.errors import LayertapError
from layertap.service.bulk.job import BatchLimits, Outline

NAME = "manifest.json"
LOCK = ".lock"
OTHERWISE = "choose another --out, or add --restart to begin anew"


class OtherModelError(LayertapError):
    """The existing output was made by a model with another fingerprint."""


@dataclass(frozen=True)
class Manifest:
    """A job: its question and source, the outline of answers, the limits of batches, whether it is complete."""

    question: dict[str, Any]
    outline: Outline
    limits: BatchLimits
    complete: bool = False
    format: Literal[2] = 2  # of the file

    def check_same(self, asked: Mapping[str, Any]) -> None:
        """LayertapError if the question differs from that of the existing output.

        No model name and the name of the model that answered are the same.
        """
        for name, value in asked.items():
            before = self.question.get(name)
            if (value or None) != (before or None) and not (name == "model" and value in (None, self.outline.model)):
                detail = f"the existing output was made with {name} {before}; this job has {value}"
                raise LayertapError(detail, hint=OTHERWISE)

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        with replace_file(folder / NAME) as temporary:
            temporary.write_bytes(json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in a folder, None if there is none; LayertapError."""
        try:
            return TypeAdapter(cls).validate_json((folder / NAME).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            # No hint of --restart: the files' owner is unknown, so none are removed.
            detail = f"{folder / NAME} is no manifest of a job, or one of another version of layertap"
            raise LayertapError(detail, hint="choose another --out") from None


def check_same_model(before: Outline, now: Outline) -> None:
    """OtherModelError if the fingerprint differs from the existing output's."""
    if now.fingerprint != before.fingerprint:
        raise OtherModelError(
            f"the existing output is of {before.model}, fingerprint {before.fingerprint}; "
            f"{now.model} has fingerprint {now.fingerprint}: the vectors can't be compared"
        )


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write a file atomically: the block writes to a temporary name, which is then synced and renamed.

    LayertapError if the disk is full, or the file can't be written for another reason; the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = "what is written stays: make room, and the same command goes on"
        raise LayertapError(f"{path} can't be written: {reason}", hint=hint) from error
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # syncs the renaming
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes for the block; LayertapError if another process holds the lock."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LayertapError(f"another process writes to {folder}", hint="wait for it, or end it") from None
        yield
