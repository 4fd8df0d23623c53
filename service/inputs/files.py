"""Reads files from disk, whole and up to a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class FileError(Exception):
    """A file can't be read; the text says why, without its name."""


def read_regular_file(path: Path, limit: int | None = None) -> bytes:
    """The bytes of a file; FileError if it is not a regular file, can't be read, or exceeds ``limit`` bytes.

    Never waits for a pipe that nobody writes to.
    """
    try:
        # Without waiting: opening a pipe blocks until another process writes to it.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise FileError("is a directory")
            if not stat.S_ISREG(status.st_mode):
                raise FileError("is no regular file")
            # Allocate only the size of the file; it may have grown, or be a /proc file of unknown size.
            data = file.read() if limit is None else file.read(min(limit, status.st_size) + 1)
            if limit is not None and status.st_size < len(data) <= limit:
                data += file.read(limit + 1 - len(data))
    except OSError as error:
        raise FileError(error.strerror or "can't be read") from None
    except ValueError as error:  # a name with a null character
        raise FileError("has no name that a file can have") from error
    if limit is not None and len(data) > limit:
        raise FileError(f"has more than {limit} bytes")
    return data
