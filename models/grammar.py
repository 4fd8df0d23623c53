"""The syntax of sources, weights and devices in a configuration; importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path, PureWindowsPath
from typing import Any

from layertap.models.errors import AbsentError, LoadError, escape, find_nearest, label_failures, suggest

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar", ".index.json", "/")
CHECKPOINT_HINT = (
    "give a .safetensors file, or a .pth, .pt, .ckpt or .bin file that torch.save(module.state_dict(), …) wrote, "
    "an index of shards, a folder with a slash at its end, or random:SEED"
)
ADAPTER_CONFIG = "adapter_config.json"
ACCELERATORS = ("cuda", "xpu", "mps")  # that torch itself has; plugins add others


@dataclass(frozen=True)
class ModelSource:
    """One kind of source, which a configuration writes before a colon; the text after it is the ``ident``."""

    example: str  # of the syntax
    module: str  # imported on first use; its ``build(ident, spec)`` returns a BuiltModel
    # The library that it needs; its module's ``find_embeddings(module, row)`` knows the embeddings of its classes.
    library: str = ""
    # The path that an ident is or begins with; empty if there is none.
    find_path: Callable[[str], str] = lambda ident: ""
    marks: tuple[str, ...] = ("config.json", "modules.json")  # files of which a folder at that path has one
    has_tags: bool = False  # after a dot in the name of an architecture
    downloads: bool = False  # weights that are neither a file nor a seed come from the network, architectures by name
    runs_code: bool = False  # of the operator's, which may register architectures
    has_image_options: bool = False  # its library has a choice of image processors, and of positions for other sizes

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
    known = kind in ("auto", "cpu", *ACCELERATORS) or (kind.isidentifier() and has_plugin())
    if not known or (index and (kind == "auto" or not index.isdecimal())):
        hint = "use auto, cpu, cuda, cuda:1, xpu or mps, or install torch's plugin for this kind"
        raise LoadError(f"{escape(name)} is no device", hint=hint)
    return kind, int(index or 0)


def has_plugin() -> bool:
    """Whether a plugin is installed that adds a kind of device to torch, whose name only the plugin knows."""
    return bool(entry_points(group="torch.backends"))


def parse_devices(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The kinds and numbers of several devices; empty for ``all``. LoadError if the list is invalid."""
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
    shown = library.replace("_", "-")
    return AbsentError(f"{shown} is not installed here", hint=f'type pip install "layertap[{shown}]"')


def import_library(name: str) -> Any:
    """Import an optional library; AbsentError if it is not installed. By name: type checkers are slow on some."""
    try:
        return import_module(name)
    except ImportError as error:
        raise not_installed_error(name) from error


def refuse_adapter(folder: Path) -> None:
    """AbsentError if a folder holds a PEFT adapter, which is no model by itself."""
    if (folder / ADAPTER_CONFIG).is_file():
        shown = escape(folder.name)
        hint = f"give the source and weights of the model that it was trained beside, and adapter: {folder.name}"
        raise AbsentError(f"{shown} holds a PEFT adapter, which is no model by itself", hint=hint)


SOURCES: dict[str, ModelSource] = {
    "torchvision": ModelSource(
        "torchvision:ARCH", "layertap.models.sources.torchvision", library="torchvision", downloads=True
    ),
    "timm": ModelSource(
        "timm:ARCH",
        "layertap.models.sources.timm",
        library="timm",
        find_path=lambda ident: ident if ident.endswith("/") else "",
        has_tags=True,
        downloads=True,
    ),
    "transformers": ModelSource(
        "transformers:PATH",
        "layertap.models.sources.transformers",
        library="transformers",
        find_path=str,
        has_image_options=True,
    ),
    "open_clip": ModelSource(
        "open_clip:PATH",
        "layertap.models.sources.open_clip",
        library="open_clip",
        find_path=str,
        marks=("open_clip_config.json",),
    ),
    "python": ModelSource(
        "python:package.module:factory",
        "layertap.models.sources.python",
        find_path=lambda ident: name if is_file(name := ident.rpartition(":")[0]) else "",
        runs_code=True,
    ),
}
LIBRARIES = frozenset(filter(None, (source.library for source in SOURCES.values())))
