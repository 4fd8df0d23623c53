"""What is wrong with a configured model, as far as it shows before anything is loaded, or torch imported.

Nothing is refused that would load: where a look from outside can't tell, it says nothing.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from layertap.models.errors import LayertapError, LoadError, escape
from layertap.models.selection.selectors import parse_selector
from layertap.models.sources.grammar import (
    OPTIONAL,
    not_installed_error,
    parse_device,
    parse_factory,
    parse_weights,
    unknown_name_error,
    unknown_source_error,
)
from layertap.models.spec import ModelSpec

Place = tuple[str | int, ...]
FEW = 10  # a library whose files name fewer architectures than this has them elsewhere
NAMED = re.compile(r'^@register_model\(name="([^"]+)"\)', re.MULTILINE)
DECORATED = re.compile(r"^@register_model\b(?:.*\n)+?def (\w+)", re.MULTILINE)
RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}", re.MULTILINE | re.DOTALL)
OLD_NAME = re.compile(r"['\"](\w+)['\"]\s*:")
DRIVER = "libcuda.so.1"


class _AbsentError(LoadError):
    """Something that may be elsewhere, or later: no mistake where a model is not required."""


@dataclass(frozen=True)
class _Context:
    """What stands beside an entry: folders in which factories are looked for, and whether any may be there."""

    folders: tuple[Path, ...]
    factories: bool


def find_mistakes(specs: Sequence[ModelSpec], folders: Sequence[Path]) -> Iterator[tuple[Place, LayertapError]]:
    """What is wrong with entries: the place, from the entry's number on, and the refusal.

    Factories are looked for in ``folders`` too.
    """
    context = _Context(tuple(folders), any(_has_factory(spec, folders) for spec in specs))
    for number, spec in enumerate(specs):
        for place, check in _checks(spec, context):
            try:
                check()
            except _AbsentError as error:
                if spec.required:
                    yield (number, *place), error
            except LayertapError as error:
                yield (number, *place), error


def _checks(spec: ModelSpec, context: _Context) -> Iterator[tuple[Place, Callable[[], object]]]:
    yield ("source",), partial(_check_source, spec, context)
    yield ("weights",), partial(_check_weights, spec)
    yield ("device",), partial(_check_device, spec)
    if spec.embedding is not None:
        yield ("embedding",), partial(parse_selector, spec.embedding)
    for number, warm in enumerate(spec.warm):
        for at, text in enumerate(warm.layers):
            yield ("warm", number, "layers", at), partial(parse_selector, text)


@cache
def list_architectures(library: str) -> frozenset[str]:
    """The architectures that a library's files register, read without importing it; none where that can't be told."""
    found = find_spec(library)
    if found is None or found.origin is None:
        return frozenset()
    names: set[str] = set()
    for file in (Path(found.origin).parent / "models").rglob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        names.update(NAMED.findall(text), DECORATED.findall(text))
        names.update(name for block in RENAMED.findall(text) for name in OLD_NAME.findall(block))
    return frozenset(names) if len(names) >= FEW else frozenset()


def _check_source(spec: ModelSpec, context: _Context) -> None:
    kind, _, ident = spec.source.partition(":")
    if not ident or kind not in SOURCES:
        raise unknown_source_error(kind, ident)
    if kind in OPTIONAL and find_spec(kind) is None:
        raise _AbsentError(not_installed_error(kind).detail, hint=not_installed_error(kind).hint)
    SOURCES[kind](ident, context)


def _check_torchvision(ident: str, context: _Context) -> None:
    # What a factory's module registers is torchvision's as well, and can't be told from outside.
    names = frozenset[str]() if context.factories else list_architectures("torchvision")
    if names and ident not in names:
        raise unknown_name_error("torchvision", ident, sorted(names))


def _check_timm(ident: str, context: _Context) -> None:
    names = frozenset[str]() if context.factories else list_architectures("timm")  # as of torchvision
    if names and ident.partition(".")[0] not in names:
        raise unknown_name_error("timm", ident, sorted(names))


def _check_directory(ident: str, context: _Context) -> None:
    if not (Path(ident) / "config.json").is_file():
        raise _AbsentError(f"there is no directory with a config.json at {ident}")


def _check_module(ident: str, context: _Context) -> None:
    package = parse_factory(ident)[0].partition(".")[0]
    if not _is_importable(package, context.folders):
        looked = ", ".join(dict.fromkeys(map(str, context.folders)))
        raise _AbsentError(f"there is no Python module {escape(package)} in {looked}, nor is it installed")


def _has_factory(spec: ModelSpec, folders: Sequence[Path]) -> bool:
    """Whether a factory's module may register what it likes: one that is not there registers nothing."""
    kind, _, ident = spec.source.partition(":")
    with suppress(LayertapError):
        return kind == "python" and _is_importable(parse_factory(ident)[0].partition(".")[0], folders)
    return False


def _is_importable(package: str, folders: Sequence[Path]) -> bool:
    if package in sys.modules or PathFinder.find_spec(package, [str(folder) for folder in folders]) is not None:
        return True
    return find_spec(package) is not None


def _check_weights(spec: ModelSpec) -> None:
    path = parse_weights(spec.weights).path
    if path is not None and not path.exists():
        raise _AbsentError(f"there is no file {path}")


def _check_device(spec: ModelSpec) -> None:
    kind, _ = parse_device(spec.device)
    if kind == "cuda" and not _may_have_gpu():
        raise _AbsentError(f"there is no device {escape(spec.device)} on this machine", hint="use auto or cpu")


def _may_have_gpu() -> bool:
    """False only where torch finds none for certain: it is built for none, or there is no driver."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return True
    built = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
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


SOURCES: dict[str, Callable[[str, _Context], None]] = {
    "torchvision": _check_torchvision,
    "timm": _check_timm,
    "transformers": _check_directory,
    "python": _check_module,
}
