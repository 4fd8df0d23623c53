"""Files on disk, read as pictures are: whole, and no more than they may be."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class FileError(Exception):
    """A file can't be read; says why, without its name."""


def read_regular_file(path: Path, limit: int | None = None) -> bytes:
    """The bytes of a file; FileError where it is none, can't be read, or has more than ``limit`` bytes.

    What is no regular file is not waited for, as one would be for a pipe that nobody writes to.
    """
    try:
        # Without waiting: to open a pipe waits for whoever writes to it.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise FileError("is a directory")
            if not stat.S_ISREG(status.st_mode):
                raise FileError("is no regular file")
            data = file.read() if limit is None else _read_at_most(file, limit + 1, status.st_size)
    except OSError as error:
        raise FileError(error.strerror or "can't be read") from None
    except ValueError as error:  # a name with a null character
        raise FileError("has no name that a file can have") from error
    if limit is not None and len(data) > limit:
        raise FileError(f"has more than {limit} bytes")
    return data


def _read_at_most(file: BinaryIO, count: int, size: int) -> bytes:
    """The first so many bytes of a file that is said to have ``size``; memory is taken for what is there alone."""
    data = file.read(min(count, size + 1))
    if size < len(data) < count:  # it has grown, or is one of those that the system makes as they are read
        data += file.read(count - len(data))
    return data
