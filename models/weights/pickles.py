"""What torch.save wrote, read without running anything of it and without reading tensors that nobody takes."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

DICTIONARIES = ("Dict", "dict")  # how names of classes end whose objects are filled like dictionaries
LISTS = ("collections.deque",)
_lock = Lock()  # what torch takes for safe is so for the whole process


class Placeholder:
    """Stands for an object of a class that is not read; ``pickled_name`` is the class's, and its contents are gone."""

    pickled_name = ""

    def __new__(cls, *args: object) -> Any:
        """An empty object, or what an object of such a name is filled like."""
        if cls.pickled_name.endswith(DICTIONARIES):
            return OrderedDict()
        return [] if cls.pickled_name in LISTS else super().__new__(cls)

    def __init__(self, *args: object) -> None:
        """Take whatever the class would be called with."""

    def __setstate__(self, state: object) -> None:
        """Forget it."""


def read_pickle(path: Path) -> object:
    """What a file holds: tensors, numbers, texts, lists and dictionaries of them, and a Placeholder for all else.

    Tensors are mapped: the bytes of one are read when it is used. Only files that torch wrote before version 1.6 are
    read in whole, and may have no other objects. Raises whatever torch.load does.
    """
    if not is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=True)
    with _lock:
        # No class or function that the file names is looked up: each is one of these, which does nothing.
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(type("Placeholder", (Placeholder,), {"pickled_name": name}), name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
