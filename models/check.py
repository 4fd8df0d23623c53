"""Mistakes in a model's entry that can be found before anything is loaded or torch is imported.

An entry that would load is never refused: if a mistake can't be detected from outside, none is reported.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from layertap.models.errors import AbsentError, LayertapError, LoadError
from layertap.models.grammar import (
    ADAPTER_CONFIG,
    SOURCES,
    check_factory,
    not_installed_error,
    parse_device,
    parse_devices,
    parse_source,
    parse_weights,
)
from layertap.models.labels import read_labels
from layertap.models.plan.selectors import parse_selector
from layertap.models.spec import ModelSpec

Place = tuple[str | int, ...]
DRIVER = "libcuda.so.1"


def find_mistakes(specs: Mapping[int, ModelSpec], folders: Sequence[Path]) -> Iterator[tuple[Place, LayertapError]]:
    """The mistakes in numbered entries: the path to the field, which begins with the entry's number, and the error.

    Factories are searched in ``folders`` too. They may register architectures: then names of these are not checked.
    """
    registers = any(_may_register(spec.source, folders) for spec in specs.values())
    for number, spec in specs.items():
        mistakes: list[tuple[Place, LayertapError]] = []
        _check(spec, folders, registers, partial(_note, mistakes, number))
        yield from (each for each in mistakes if spec.required or not isinstance(each[1], AbsentError))


def _may_register(text: str, folders: Sequence[Path]) -> bool:
    """Whether a source is a factory that is there."""
    with suppress(LayertapError, OSError):
        source, ident = parse_source(text)
        if source is SOURCES["python"]:
            check_factory(ident, folders)
            return True
    return False


@contextmanager
def _note(mistakes: list[tuple[Place, LayertapError]], *place: str | int) -> Iterator[None]:
    """Note what is raised inside as a mistake of that field."""
    try:
        yield
    except OSError as error:  # a path is too long, or a folder is not accessible
        mistakes.append((place, AbsentError(f"{error.filename} can't be read: {error.strerror}")))
    except LayertapError as error:
        mistakes.append((place, error))


def _check(
    spec: ModelSpec, folders: Sequence[Path], registers: bool, note: Callable[..., AbstractContextManager[None]]
) -> None:
    with note("source"):
        source, ident = parse_source(spec.source)
        if source.extra is not None:
            _check_installed(source.extra)
        if source.check is not None and not (registers and source.downloads):
            source.check(ident, folders)
    with note("weights"):
        _check_weights(spec.weights)
    if spec.prefix:
        with note("prefix"):
            if parse_weights(spec.weights).path is None:
                raise LoadError("prefix is of names in a checkpoint, and weights names none", hint="leave prefix out")
    if spec.adapter:
        with note("adapter"):
            _check_installed("peft")
            if not (Path(spec.adapter) / ADAPTER_CONFIG).is_file():
                raise AbsentError(f"there is no {ADAPTER_CONFIG} in {spec.adapter}")
    with note("devices" if spec.devices else "device"):
        devices = parse_devices(spec.devices) if spec.devices else (parse_device(spec.device),)
        if (not devices or devices[0][0] == "cuda") and not _may_have_gpu():
            raise AbsentError("there is no GPU on this machine", hint="use device: auto or cpu")
    if spec.labels is not None:
        with note("labels"):
            read_labels(spec.labels)
    if spec.embedding_layer is not None:
        with note("embedding"):
            parse_selector(spec.embedding_layer)
    for name, path in spec.projections.items():
        with note("projections", name):
            _check_weights(path)
    for number, warm in enumerate(spec.warm):
        for at, text in enumerate(warm.layers):
            with note("warm", number, "layers", at):
                parse_selector(text)


def _check_installed(library: str) -> None:
    if find_spec(library) is None:
        raise not_installed_error(library)


def _check_weights(text: str) -> None:
    path = parse_weights(text).path
    if path is not None and not path.exists():
        raise AbsentError(f"there is no file {path}")


def _may_have_gpu() -> bool:
    """False only if torch certainly finds no GPU: it is built without support, or there is no driver."""
    torch_spec = find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return True
    built = (Path(torch_spec.origin).parent / "version.py").read_text(encoding="utf-8")
    without = {name for name in ("cuda", "hip") if re.search(rf"^{name}\b.*= None$", built, re.MULTILINE)}
    if "hip" not in without or sys.platform != "linux":
        return True
    if "cuda" in without:
        return False
    try:
        ctypes.CDLL(DRIVER)  # as torch itself looks for it
    except OSError:
        return False
    return True
