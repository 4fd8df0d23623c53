"""How a configuration writes weights, devices and factories: text to what it means; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from layertap.models.errors import LoadError, escape, find_nearest, label_failures, suggest

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar", ".index.json", "/")
CHECKPOINT_HINT = (
    "give a .safetensors file, or a .pth, .pt, .ckpt or .bin file that torch.save(module.state_dict(), …) wrote, "
    "an index of shards, a folder with a slash at its end, or random:SEED"
)


@dataclass(frozen=True)
class WeightsSource:
    """Where weights come from: a seed, a checkpoint, or, with neither, a name that the source knows.

    ``label`` is for people: it never holds a directory.
    """

    label: str
    seed: int | None = None
    path: Path | None = None


@label_failures("weights")
def parse_weights(text: str) -> WeightsSource:
    """What a configuration's ``weights`` means.

    Raises LoadError for a seed that is no whole number and for a file of a kind that is not read.
    """
    kind, _, rest = text.partition(":")
    if kind == "random":
        return WeightsSource(text, seed=_seed(rest))
    if is_checkpoint(text):
        return WeightsSource(get_base_name(text), path=Path(text))
    if get_base_name(text) != text:
        raise LoadError(f"weights {escape(get_base_name(text))} are of a kind that is not read", hint=CHECKPOINT_HINT)
    return WeightsSource(text)


def is_checkpoint(text: str) -> bool:
    """Whether weights are written as a path: of a file, an index of shards, or a folder, with a slash at its end."""
    return not text.startswith("random:") and text.lower().endswith(CHECKPOINTS)


def parse_device(name: str) -> tuple[str, int]:
    """The kind of device and its number; LoadError where it is no device's name. ``auto`` is a kind."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind == "auto" or not index.isdecimal())):
        raise LoadError(f"{escape(name)} is no device", hint="use auto, cpu, cuda or cuda:1")
    return kind, int(index or 0)


def parse_devices(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The kinds and numbers of several devices; nothing for ``all``, every GPU. LoadError where they make no sense."""
    if tuple(names) == ("all",):
        return ()
    devices = tuple(parse_device(name) for name in names)
    if len({kind for kind, _ in devices}) > 1 or devices[0][0] == "auto":
        raise LoadError("devices are GPUs by their numbers, or all", hint="write devices: [cuda:0, cuda:1]")
    if len(set(devices)) < len(devices):
        raise LoadError("a device is there twice", hint="name each of devices once")
    return devices


def parse_factory(ident: str) -> tuple[str, str]:
    """The module, or the path of its file, and the name of a factory; LoadError where it is not written as these."""
    name, _, factory = ident.rpartition(":")
    if not factory.isidentifier() or not (is_file(name) or all(part.isidentifier() for part in name.split("."))):
        hint = "type python:package.module:factory or python:PATH.py:factory"
        raise LoadError("source python: needs a module and a factory", hint=hint)
    return name, factory


def is_file(name: str) -> bool:
    """Whether a factory's module is written as the path of a file."""
    return PureWindowsPath(name).suffix == ".py" and PureWindowsPath(name).stem.isidentifier()


def is_folder(ident: str) -> bool:
    """Whether an architecture is written as the path of a folder: with a slash at its end."""
    return ident.endswith("/")


def show_folder(ident: str) -> str:
    """An architecture as anyone may see it: of a folder its name."""
    return get_base_name(ident) if is_folder(ident) else ident


def show_factory(ident: str) -> str:
    """A factory as anyone may see it, and as fingerprints have it: of a file its name without folder and ending."""
    name, _, factory = ident.rpartition(":")
    return f"{PureWindowsPath(name).stem}:{factory}" if is_file(name) else ident


def get_base_name(text: str) -> str:
    """The last part of a path of either kind, or the text itself."""
    return PureWindowsPath(text).name


def unknown_name_error(kind: str, ident: str, names: Iterable[str]) -> LoadError:
    """The refusal of an architecture that a source does not have, with the exact strings of near matches."""
    shown = get_base_name(ident)
    matches = tuple(f"{kind}:{name}" for name in find_nearest(shown, names, 3))
    return LoadError(f"{kind} has no architecture {escape(shown)}", hint=suggest(matches))


def not_installed_error(library: str) -> LoadError:
    """The refusal of a source whose library is not here."""
    return LoadError(f"{library} is not installed here", hint=f'type pip install "layertap[{library}]"')


def _seed(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text[:20]) < 2**64 and len(text) <= 20:
        return int(text)
    raise LoadError("weights random:SEED needs a whole number from 0 to 2**64 - 1", hint="type random:0")
