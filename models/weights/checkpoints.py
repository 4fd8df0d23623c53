"""Checkpoints on disk, read as plain tensors: no code in them is run, and tensors that nobody takes are not read."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import CHECKPOINT_HINT, get_base_name, refuse_adapter
from layertap.models.weights.names import StateDict, drop_wrapper_names

INDEX = ".index.json"
SHARDS = (".safetensors", ".bin")
FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
# Which dictionary is read: the first of these. Averaged weights come before others: they are what is evaluated.
AVERAGED = ("state_dict_ema", "model_ema_state_dict", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema")
PLAIN = (
    *("state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net", "network"),
    *("module", "weights", "params"),
)
SWAPPED = "message_hub"  # MMEngine, which has this, exchanges the two: its state_dict is the averaged one
MAX_DEPTH = 3
MAX_SHOWN = 3
Container = Callable[[], object]
_lock = Lock()  # what torch takes for safe is so for the whole process


@label_failures("weights")
def read_checkpoint(path: Path | str, prefix: str = "") -> StateDict:
    """The tensors of a checkpoint by name, on the CPU; code in it is never run, other parts of it are not read.

    It is a file, an index of shards, or a folder with either as the hub lays it out.
    Out of a training script's dictionaries comes the first that holds a model's tensors, averaged ones before others,
    or those at ``prefix``; what torch.compile and data parallelism put before names is taken off.
    Raises LoadError, which names the file without its directory.
    """
    shown = escape(get_base_name(str(path)))
    return drop_wrapper_names(_find_state_dict(_read(Path(path), shown), shown, prefix))


def find_weights(folder: Path) -> Path:
    """The file of a folder's weights, or their index: the first of ``FILES`` that is there; LoadError."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    refuse_adapter(folder)
    detail = f"{escape(folder.name)} holds no {FILES[0]}"
    raise LoadError(detail, hint=f"it takes one of {', '.join(FILES)}; or give the path of another file")


def _read(path: Path, shown: str) -> object:
    """What a file holds, or the shards of an index, or what is found in a folder."""
    if path.is_dir():
        path = find_weights(path)
    if path.name.endswith(INDEX) and path.is_file():
        return _join_shards(path)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise LoadError(f"checkpoint {shown} is of a kind that is not read", hint=CHECKPOINT_HINT)
    try:
        return read(path)
    except LoadError:
        raise
    except FileNotFoundError as error:
        raise LoadError(f"there is no checkpoint {shown} where the configuration says") from error
    except Exception as error:
        detail = f"checkpoint {shown} could not be read as plain tensors ({type(error).__name__})"
        raise LoadError(detail, hint=CHECKPOINT_HINT) from error


def _join_shards(index: Path) -> StateDict:
    """The tensors of the shards beside an index; LoadError where it is none, or names others."""
    try:
        names: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted({str(name) for name in names.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{escape(index.name)} is no index of shards") from error
    if not shards or any(Path(shard).name != shard or not shard.endswith(SHARDS) for shard in shards):
        raise LoadError(f"{escape(index.name)} names shards that are not beside it")
    state = StateDict()
    for shard in shards:
        shown = escape(shard)
        tensors = _find_state_dict(_read(index.parent / shard, shown), shown)
        if not tensors.keys() >= {name for name, each in names.items() if each == shard}:
            raise LoadError(f"{shown} lacks tensors that {escape(index.name)} says it has", hint="download it again")
        state.update(tensors)
    return state


def _read_safetensors(path: Path) -> StateDict:
    with safe_open(path, framework="pt") as file:
        state = StateDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary
        state.shared_names = dict(file.metadata() or {})
    return state


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


def _read_pickle(path: Path) -> object:
    """What torch.save wrote: tensors, numbers, texts, lists and dictionaries of them, and a Placeholder for all else.

    Tensors are mapped: the bytes of one are read when it is used. Only files that torch wrote before version 1.6 are
    read in whole, and may have no other objects. Raises whatever torch.load does; LoadError for a TorchScript archive.
    """
    if not is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=True)
    with ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            detail = f"checkpoint {escape(path.name)} is a TorchScript archive, which is code with its tensors"
            raise LoadError(detail, hint=_describe_conversion("torch.jit.load('FILE', map_location='cpu')"))
    with _lock:
        names = get_unsafe_globals_in_checkpoint(path)
        containers: dict[str, Container] = {}
        while True:
            # No class or function that the file names is looked up: each is a placeholder, which does nothing.
            placeholders: list[Any] = [(_make_placeholder(name, containers.get(name)), name) for name in names]
            try:
                with safe_globals(placeholders):
                    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:
                # A subclass of dict or list shows itself when it is filled, which torch does to no other object.
                message = str(error)
                name = next((each for each in names if f"<class '{each}'>" in message), None)
                if name is None or name in containers:
                    raise
                containers[name] = list if "lists" in message else OrderedDict


def _make_placeholder(name: str, container: Container | None) -> type[Placeholder]:
    """A placeholder that errors call by the class's own name."""
    module, _, last = name.rpartition(".")
    fields = {"pickled_name": name, "container": staticmethod(container) if container else None}
    return type(last, (Placeholder,), {"__module__": module, "__qualname__": last, **fields})


def _find_state_dict(loaded: object, shown: str, prefix: str = "") -> StateDict:
    """The tensors that a file is read for, under the keys that scripts use for them, or those at ``prefix``.

    A prefix is of names as they stand in the file: keys of dictionaries first, if any, then how names begin.
    LoadError where there is no dictionary of tensors.
    """
    prefix = prefix and f"{prefix.removesuffix('.')}."
    outer, keys = loaded, list[str]()
    while isinstance(outer, dict) and isinstance(outer.get(key := prefix.partition(".")[0]), dict):
        outer, prefix = outer[key], prefix.partition(".")[2]
        keys.append(key)
    path = _find_path(outer, ())
    if path is None:
        raise _make_refusal(outer, shown)
    for key in path:
        outer = outer[key]  # type: ignore[index]
    state = outer if isinstance(outer, StateDict) else StateDict(outer)  # type: ignore[call-overload]
    state.key = ".".join((*keys, *path))
    if isinstance(loaded, dict) and state.key:
        state.unread = tuple(_list_unread(loaded, (*keys, *path)))
    return state.take_prefixes(prefix) if prefix else state


def _find_path(value: object, path: tuple[str, ...]) -> tuple[str, ...] | None:
    if not isinstance(value, dict) or len(path) > MAX_DEPTH:
        return None
    if value and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items()):
        return path
    keys = (*PLAIN, *AVERAGED) if SWAPPED in value else (*AVERAGED, *PLAIN)
    paths = (_find_path(value.get(key), (*path, key)) for key in keys)
    return next((each for each in paths if each is not None), None)


def _list_unread(loaded: dict[Any, Any], path: tuple[str, ...]) -> Iterator[str]:
    """What stands beside each dictionary on the way to the one that is read."""
    for depth, key in enumerate(path):
        yield from (".".join((*path[:depth], str(other))) for other in loaded if other != key)
        loaded = loaded[key]


def _make_refusal(loaded: object, shown: str) -> LoadError:
    entries: Mapping[Any, object] = loaded if isinstance(loaded, dict) else {}
    for key, value in {"": loaded, **{key: entries.get(key) for key in (*PLAIN, *AVERAGED)}}.items():
        if isinstance(value, Placeholder):
            name = escape(value.pickled_name)
            detail = f"checkpoint {shown} holds a pickled object of {name}, which is code, in place of its tensors"
            load = f"torch.load('FILE', weights_only=False, map_location='cpu'){f'[{key!r}]' if key else ''}"
            return LoadError(detail, hint=_describe_conversion(load))
    paths = ((key, _find_path(value, ())) for key, value in entries.items() if isinstance(key, str))
    others = [".".join((key, *path)) for key, path in paths if path is not None]
    if others:
        hint = f"type prefix: {' or '.join(escape(f'{key}.') for key in others[:MAX_SHOWN])}"
        return LoadError(f"checkpoint {shown} has its tensors under keys that are not known", hint=hint)
    if any(isinstance(value, Tensor) for value in entries.values()):
        return LoadError(f"checkpoint {shown} holds other things beside named tensors", hint=CHECKPOINT_HINT)
    return LoadError(f"checkpoint {shown} holds no dictionary of tensors", hint=CHECKPOINT_HINT)


def _describe_conversion(load: str) -> str:
    """What to run, where the file is trusted, to get the tensors out of a module that is code."""
    return (
        f"convert it where you trust it, for this runs its code: import torch; module = {load}; "
        "torch.save(module.state_dict(), 'weights.pth')"
    )


READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    **dict.fromkeys((".pth", ".pt", ".ckpt", ".bin", ".tar"), _read_pickle),
}
