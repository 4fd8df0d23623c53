"""What torch.save wrote, read without running anything of it and without reading tensors that nobody takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from layertap.models.errors import LoadError, escape

Container = Callable[[], object]
_lock = Lock()  # what torch takes for safe is so for the whole process


class Placeholder:
    """Stands for an object of a class that is not read; ``pickled_name`` is the class's, and its contents are gone.

    ``container`` makes what stands for it in place of this, where it is filled like a dictionary or a list.
    """

    pickled_name = ""
    container: Container | None = None

    def __new__(cls, *args: object) -> Any:
        """An empty object, whatever the class would be called with."""
        return super().__new__(cls) if cls.container is None else cls.container()

    def __init__(self, *args: object) -> None:
        """Take whatever the class would be called with."""

    def __setstate__(self, state: object) -> None:
        """Forget it."""


def read_pickle(path: Path) -> object:
    """What a file holds: tensors, numbers, texts, lists and dictionaries of them, and a Placeholder for all else.

    Tensors are mapped: the bytes of one are read when it is used. Only files that torch wrote before version 1.6 are
    read in whole, and may have no other objects. Raises whatever torch.load does; LoadError for a TorchScript archive.
    """
    if not is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=True)
    with ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            detail = f"checkpoint {escape(path.name)} is a TorchScript archive, which is code with its tensors"
            raise LoadError(detail, hint=describe_conversion("torch.jit.load('FILE', map_location='cpu')"))
    with _lock:
        names = get_unsafe_globals_in_checkpoint(path)
        containers: dict[str, Container] = {}
        while True:
            try:
                return _load(path, names, containers)
            except Exception as error:
                # A subclass of dict or list shows itself when it is filled, which torch does to no other object.
                message = str(error)
                name = next((each for each in names if f"<class '{each}'>" in message), None)
                if name is None or name in containers:
                    raise
                containers[name] = list if "lists" in message else OrderedDict


def describe_conversion(load: str) -> str:
    """What to run, where the file is trusted, to get the tensors out of a module that is code."""
    return (
        f"convert it where you trust it, for this runs its code: import torch; module = {load}; "
        "torch.save(module.state_dict(), 'weights.pth')"
    )


def _load(path: Path, names: list[str], containers: Mapping[str, Container]) -> object:
    """No class or function that the file names is looked up: each is a placeholder, which does nothing."""
    placeholders: list[Any] = [(_make_placeholder(name, containers.get(name)), name) for name in names]
    with safe_globals(placeholders):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _make_placeholder(name: str, container: Container | None) -> type[Placeholder]:
    """A placeholder that errors call by the class's own name."""
    module, _, last = name.rpartition(".")
    fields = {"pickled_name": name, "container": staticmethod(container) if container else None}
    return type(last, (Placeholder,), {"__module__": module, "__qualname__": last, **fields})
