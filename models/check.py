"""Mistakes in a model's entry that can be found before anything is loaded or torch is imported.

An entry that would load is never refused: if a mistake can't be detected from outside, none is reported.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from layertap.models.errors import AbsentError, LayertapError, LoadError, escape
from layertap.models.grammar import (
    ADAPTER_CONFIG,
    ModelSource,
    has_plugin,
    is_file,
    not_installed_error,
    parse_device,
    parse_devices,
    parse_factory,
    parse_source,
    parse_weights,
    refuse_adapter,
    unknown_name_error,
)
from layertap.models.labels import read_labels
from layertap.models.plan.selectors import parse_selector
from layertap.models.spec import ModelSpec

Address = tuple[str | int, ...]
DRIVER = "libcuda.so.1"
MIN_ARCHITECTURES = 10  # fewer names in a library's files: it registers them elsewhere
NAMED = re.compile(r'^@register_model\(name="([^"]+)"\)', re.MULTILINE)
DECORATED = re.compile(r"^@register_model\b(?:.*\n)+?def (\w+)", re.MULTILINE)
RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}", re.MULTILINE | re.DOTALL)
OLD_NAME = re.compile(r"['\"](\w+)['\"]\s*:")


def find_mistakes(specs: Mapping[int, ModelSpec], folders: Sequence[Path]) -> Iterator[tuple[Address, LayertapError]]:
    """The mistakes in numbered entries: the path to the field, which begins with the entry's number, and the error.

    Factories are searched in ``folders`` too. They may register architectures: then names of these are not checked.
    """
    registers = any(_may_register(spec.source, folders) for spec in specs.values())
    for number, spec in specs.items():
        mistakes: list[tuple[Address, LayertapError]] = []
        _check(spec, folders, registers, partial(_note, mistakes, number))
        yield from (each for each in mistakes if spec.required or not isinstance(each[1], AbsentError))


def _may_register(text: str, folders: Sequence[Path]) -> bool:
    """Whether a source is a factory that is there."""
    with suppress(LayertapError, OSError):
        source, ident = parse_source(text)
        if source.runs_code:
            _check_factory(ident, folders)
            return True
    return False


@contextmanager
def _note(mistakes: list[tuple[Address, LayertapError]], *address: str | int) -> Iterator[None]:
    """Note what is raised inside as a mistake of that field."""
    try:
        yield
    except OSError as error:  # a path is too long, or a folder is not accessible
        mistakes.append((address, AbsentError(f"{error.filename} can't be read: {error.strerror}")))
    except LayertapError as error:
        mistakes.append((address, error))


def _check(
    spec: ModelSpec, folders: Sequence[Path], registers: bool, note: Callable[..., AbstractContextManager[None]]
) -> None:
    with note("source"):
        source, ident = parse_source(spec.source)
        _check_source(source, ident, folders, registers=registers)
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
        if not _may_have(devices[0][0] if devices else "all"):
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


def _check_source(source: ModelSource, ident: str, folders: Sequence[Path], *, registers: bool) -> None:
    """LoadError if a source has no model of that name, AbsentError for a missing library, folder, package or file."""
    if source.library:
        _check_installed(source.library)
    if source.runs_code:
        _check_factory(ident, folders)
    elif source.find_path(ident):
        _check_directory(Path(ident), source.marks)
    elif source.downloads and not registers:
        names = list_architectures(source.library)
        if names and (ident.partition(".")[0] if source.has_tags else ident) not in names:
            raise unknown_name_error(source.library, ident, sorted(names))


def _check_directory(folder: Path, marks: Sequence[str]) -> None:
    """AbsentError if there is no directory with one of the files by which its source knows it."""
    if not any((folder / name).is_file() for name in marks):
        refuse_adapter(folder)
        raise AbsentError(f"there is no directory with {marks[0]} at {folder}")


def _check_factory(ident: str, folders: Sequence[Path]) -> None:
    """LoadError if a factory's syntax is wrong, AbsentError if its package or file is missing."""
    name, _ = parse_factory(ident)
    package = name.partition(".")[0]
    if is_file(name):
        if not Path(name).is_file():
            raise AbsentError(f"there is no file {name}")
    elif (
        package not in sys.modules
        and not PathFinder.find_spec(package, [*map(str, folders)])
        and not find_spec(package)
    ):
        shown = ", ".join(dict.fromkeys(map(str, folders)))
        raise AbsentError(f"there is no Python module {escape(package)} in {shown}, nor is it installed")


@cache
def list_architectures(library: str, files: str = "**/*.py") -> frozenset[str]:
    """The architectures that a library's files register, read without importing it; empty if unknown.

    ``files`` "*.py" selects torchvision's for image classification: its others are in subfolders.
    """
    package = find_spec(library)
    if package is None or package.origin is None:
        return frozenset()
    names: set[str] = set()
    for file in (Path(package.origin).parent / "models").glob(files):
        text = file.read_text(encoding="utf-8", errors="replace")
        names.update(NAMED.findall(text), DECORATED.findall(text))
        names.update(name for block in RENAMED.findall(text) for name in OLD_NAME.findall(block))
    return frozenset(names) if len(names) >= MIN_ARCHITECTURES else frozenset()


def _check_installed(library: str) -> None:
    if find_spec(library) is None:
        raise not_installed_error(library)


def _check_weights(text: str) -> None:
    path = parse_weights(text).path
    if path is not None and not path.exists():
        raise AbsentError(f"there is no file {path}")


def _may_have(kind: str) -> bool:
    """False only if torch certainly finds no such device: it is built without support, or there is no driver."""
    torch_spec = find_spec("torch")
    if kind in ("auto", "cpu") or torch_spec is None or torch_spec.origin is None or has_plugin():
        return True
    built = (Path(torch_spec.origin).parent / "version.py").read_text(encoding="utf-8")
    has = {name for name in ("cuda", "hip", "xpu") if not re.search(rf"^{name}\b.*= None$", built, re.MULTILINE)}
    if "cuda" in has and sys.platform == "linux":
        try:
            ctypes.CDLL(DRIVER)  # as torch itself looks for it
        except OSError:
            has.remove("cuda")
    has |= {"cuda"} if "hip" in has else set()  # the name of its devices
    has |= {"mps"} if sys.platform == "darwin" else set()
    return bool(has) if kind == "all" else kind in has
