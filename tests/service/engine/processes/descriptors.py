"""A process that has no descriptors left, as one with very many connections."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def list_descriptors() -> set[str]:
    """The descriptors of this process."""
    return {each.name for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}


@contextmanager
def leave_descriptors(count: int) -> Iterator[None]:
    """Let this process open so many more until the block ends."""
    taken = [os.dup(0) for _ in range(count + 1)]
    for each in taken:
        os.close(each)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
