"""The syntax of sources, weights and devices in a configuration, and the mistakes that can be found without torch.

An entry that would load is never refused: if a mistake can't be detected from outside, none is reported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath

from layertap.models.errors import AbsentError, LoadError, escape, find_nearest, label_failures, suggest

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar", ".index.json", "/")
CHECKPOINT_HINT = (
    "give a .safetensors file, or a .pth, .pt, .ckpt or .bin file that torch.save(module.state_dict(), …) wrote, "
    "an index of shards, a folder with a slash at its end, or random:SEED"
)
ADAPTER_CONFIG = "adapter_config.json"
MIN_ARCHITECTURES = 10  # fewer names in a library's files: it registers them elsewhere
NAMED = re.compile(r'^@register_model\(name="([^"]+)"\)', re.MULTILINE)
DECORATED = re.compile(r"^@register_model\b(?:.*\n)+?def (\w+)", re.MULTILINE)
RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}", re.MULTILINE | re.DOTALL)
OLD_NAME = re.compile(r"['\"](\w+)['\"]\s*:")


@dataclass(frozen=True)
class ModelSource:
    """One kind of source, which a configuration writes before a colon; the text after it is the ``ident``."""

    example: str  # of the syntax
    module: str  # imported on first use; its ``build(ident, spec)`` returns a BuiltModel
    # LoadError for mistakes that can be found without torch, from the ident and the folders of factories.
    check: Callable[[str, Sequence[Path]], None] | None = None
    extra: str | None = None  # the library, and the extra of this package, that it needs
    # The path that an ident is or begins with; empty if there is none.
    find_path: Callable[[str], str] = lambda ident: ""
    downloads: bool = False  # weights that are neither a file nor a seed come from the network, architectures by name

    def show(self, ident: str) -> str:
        """The ident, safe to show: only the last part of a path, without ``.py``."""
        path = self.find_path(ident)
        return get_base_name(path).removesuffix(".py") + ident[len(path) :]


def parse_source(text: str) -> tuple[ModelSource, str]:
    """Split KIND:NAME into the kind's ModelSource and the name; LoadError if it is malformed or the kind is unknown."""
    kind, _, ident = text.partition(":")
    source = SOURCES.get(kind)
    if source is not None and ident:
        return source, ident
    *examples, last = (row.example for row in SOURCES.values())
    hint = f"type {', '.join(examples)} or {last}"
    shown = escape(get_base_name(kind))
    if not ident:
        raise LoadError(f"source {shown} has no KIND: in front of a name", hint=hint)
    matches = tuple(f"{name}:{get_base_name(ident)}" for name in find_nearest(kind, SOURCES))
    raise LoadError(f"sources of kind {shown} are not known", hint=suggest(matches) or hint)


@dataclass(frozen=True)
class WeightsSource:
    """Where weights come from: a seed, a checkpoint, or, with neither, a name that the source knows."""

    label: str  # for people, without a directory
    seed: int | None = None
    path: Path | None = None

    @property
    def is_named(self) -> bool:
        """Whether the weights are a name that the source must know."""
        return self.seed is None and self.path is None


@label_failures("weights")
def parse_weights(text: str) -> WeightsSource:
    """Parse a configuration's ``weights``.

    LoadError for a seed that is no integer and for an unsupported kind of file.
    """
    kind, _, seed = text.partition(":")
    if kind == "random":
        if not (seed.isascii() and seed.isdigit() and len(seed) <= 20 and int(seed) < 2**64):
            raise LoadError("weights random:SEED needs a whole number from 0 to 2**64 - 1", hint="type random:0")
        return WeightsSource(text, seed=int(seed))
    label = get_base_name(text)
    if is_checkpoint(text):
        return WeightsSource(label, path=Path(text))
    if label != text:
        raise LoadError(f"weights {escape(label)} are of a kind that is not read", hint=CHECKPOINT_HINT)
    return WeightsSource(text)


def is_checkpoint(text: str) -> bool:
    """Whether weights are written as a path: of a file, an index of shards, or a folder, with a slash at its end."""
    return not text.startswith("random:") and text.lower().endswith(CHECKPOINTS)


def parse_device(name: str) -> tuple[str, int]:
    """The kind of device, which may be ``auto``, and its number; LoadError if the name is invalid."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind == "auto" or not index.isdecimal())):
        raise LoadError(f"{escape(name)} is no device", hint="use auto, cpu, cuda or cuda:1")
    return kind, int(index or 0)


def parse_devices(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The kinds and numbers of several devices; empty for ``all``, every GPU. LoadError if the list is invalid."""
    if tuple(names) == ("all",):
        return ()
    devices = tuple(parse_device(name) for name in names)
    if len({kind for kind, _ in devices}) > 1 or devices[0][0] == "auto":
        raise LoadError("devices are GPUs by their numbers, or all", hint="write devices: [cuda:0, cuda:1]")
    if len(set(devices)) < len(devices):
        raise LoadError("a device is there twice", hint="name each of devices once")
    return devices


def parse_factory(ident: str) -> tuple[str, str]:
    """The module, or its file's path, and the name of a factory; LoadError if the syntax is wrong."""
    name, _, factory = ident.rpartition(":")
    if not factory.isidentifier() or not (is_file(name) or all(part.isidentifier() for part in name.split("."))):
        hint = "type python:package.module:factory or python:PATH.py:factory"
        raise LoadError("source python: needs a module and a factory", hint=hint)
    return name, factory


def is_file(name: str) -> bool:
    """Whether a factory's module is written as the path of a file."""
    return PureWindowsPath(name).suffix == ".py" and PureWindowsPath(name).stem.isidentifier()


def get_base_name(text: str) -> str:
    """The last part of a POSIX or Windows path, or the text itself."""
    return PureWindowsPath(text).name


def unknown_name_error(kind: str, ident: str, names: Iterable[str]) -> LoadError:
    """The error for an architecture that a source does not have, with near matches to copy."""
    shown = get_base_name(ident)
    matches = tuple(f"{kind}:{name}" for name in find_nearest(shown, names, 3))
    return LoadError(f"{kind} has no architecture {escape(shown)}", hint=suggest(matches))


def not_installed_error(library: str) -> AbsentError:
    """The error for a source whose library is not installed."""
    return AbsentError(f"{library} is not installed here", hint=f'type pip install "layertap[{library}]"')


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


def refuse_adapter(folder: Path) -> None:
    """AbsentError if a folder holds a PEFT adapter, which is no model by itself."""
    if (folder / ADAPTER_CONFIG).is_file():
        shown = escape(folder.name)
        hint = f"give the source and weights of the model that it was trained beside, and adapter: {folder.name}"
        raise AbsentError(f"{shown} holds a PEFT adapter, which is no model by itself", hint=hint)


def _check_architecture(ident: str, folders: Sequence[Path], library: str) -> None:
    """LoadError if a library has no architecture of that name (without its tag), AbsentError for a missing folder."""
    if SOURCES[library].find_path(ident):
        _check_directory(ident, folders)
        return
    name = ident.partition(".")[0] if library == "timm" else ident  # only timm has tags
    names = list_architectures(library)
    if names and name not in names:
        raise unknown_name_error(library, ident, sorted(names))


def _check_directory(ident: str, folders: Sequence[Path]) -> None:
    """AbsentError if there is no directory in the hub's layout, or in the older sentence-transformers layout."""
    if not any((Path(ident) / name).is_file() for name in ("config.json", "modules.json")):
        refuse_adapter(Path(ident))
        raise AbsentError(f"there is no directory with a config.json at {ident}")


def check_factory(ident: str, folders: Sequence[Path]) -> None:
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


SOURCES: dict[str, ModelSource] = {
    "torchvision": ModelSource(
        "torchvision:ARCH",
        "layertap.models.sources.torchvision",
        partial(_check_architecture, library="torchvision"),
        downloads=True,
    ),
    "timm": ModelSource(
        "timm:ARCH",
        "layertap.models.sources.timm",
        partial(_check_architecture, library="timm"),
        extra="timm",
        find_path=lambda ident: ident if ident.endswith("/") else "",
        downloads=True,
    ),
    "transformers": ModelSource(
        "transformers:PATH",
        "layertap.models.sources.transformers",
        _check_directory,
        extra="transformers",
        find_path=str,
    ),
    "python": ModelSource(
        "python:package.module:factory",
        "layertap.models.sources.python",
        check_factory,
        find_path=lambda ident: name if is_file(name := ident.rpartition(":")[0]) else "",
    ),
}
