"""What can be seen of a source before torch is imported: architectures in a library's files, directories, packages.

Nothing is refused that would load: where a look from outside can't tell, a check says nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from layertap.models.errors import AbsentError, escape
from layertap.models.sources.grammar import is_file, is_folder, parse_factory, unknown_name_error
from layertap.models.weights.folders import refuse_adapter

MIN_ARCHITECTURES = 10  # a library whose files name fewer has them elsewhere
NAMED = re.compile(r'^@register_model\(name="([^"]+)"\)', re.MULTILINE)
DECORATED = re.compile(r"^@register_model\b(?:.*\n)+?def (\w+)", re.MULTILINE)
RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}", re.MULTILINE | re.DOTALL)
OLD_NAME = re.compile(r"['\"](\w+)['\"]\s*:")


@dataclass(frozen=True)
class CheckContext:
    """What a source is checked beside.

    ``folders`` are those in which factories are looked for. ``registers``: whether a factory of the configuration may
    register architectures of a library, which can't be told from outside.
    """

    folders: tuple[Path, ...]
    registers: bool


@cache
def list_architectures(library: str) -> frozenset[str]:
    """The architectures that a library's files register, read without importing it; none where that can't be told."""
    return _read_architectures(library, "**/*.py")


@cache
def list_classifiers() -> frozenset[str]:
    """The architectures for image classification among torchvision's, read in the same way.

    Those of other tasks, and those made for quantisation, lie in folders of their own.
    """
    return _read_architectures("torchvision", "*.py")


def _read_architectures(library: str, files: str) -> frozenset[str]:
    package = find_spec(library)
    if package is None or package.origin is None:
        return frozenset()
    names: set[str] = set()
    for file in (Path(package.origin).parent / "models").glob(files):
        text = file.read_text(encoding="utf-8", errors="replace")
        names.update(NAMED.findall(text), DECORATED.findall(text))
        names.update(name for block in RENAMED.findall(text) for name in OLD_NAME.findall(block))
    return frozenset(names) if len(names) >= MIN_ARCHITECTURES else frozenset()


def is_importable(package: str, folders: Sequence[Path]) -> bool:
    """Whether a package is installed, or lies in one of the folders."""
    if package in sys.modules or PathFinder.find_spec(package, [str(folder) for folder in folders]) is not None:
        return True
    return find_spec(package) is not None


def check_torchvision_architecture(ident: str, context: CheckContext) -> None:
    """LoadError where torchvision has no architecture of that name."""
    names = frozenset[str]() if context.registers else list_architectures("torchvision")
    if names and ident not in names:
        raise unknown_name_error("torchvision", ident, sorted(names))


def check_timm_architecture(ident: str, context: CheckContext) -> None:
    """LoadError where timm has no architecture of that name, a tag aside; AbsentError where there is no such folder."""
    if is_folder(ident):
        check_directory(ident, context)
        return
    names = frozenset[str]() if context.registers else list_architectures("timm")
    if names and ident.partition(".")[0] not in names:
        raise unknown_name_error("timm", ident, sorted(names))


def check_directory(ident: str, context: CheckContext) -> None:
    """AbsentError where there is no directory as the hub lays it out, or as sentence-transformers once did."""
    if not any((Path(ident) / name).is_file() for name in ("config.json", "modules.json")):
        refuse_adapter(Path(ident))
        raise AbsentError(f"there is no directory with a config.json at {ident}")


def check_factory(ident: str, context: CheckContext) -> None:
    """LoadError where a factory is not written as one, AbsentError where there is no such package or file."""
    name, _ = parse_factory(ident)
    if is_file(name):
        if not Path(name).is_file():
            raise AbsentError(f"there is no file {name}")
        return
    package = name.partition(".")[0]
    if not is_importable(package, context.folders):
        folders = ", ".join(dict.fromkeys(map(str, context.folders)))
        raise AbsentError(f"there is no Python module {escape(package)} in {folders}, nor is it installed")
