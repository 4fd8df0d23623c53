"""Checkpoints on disk, read as plain tensors: no code in them is run, and unused tensors are not read."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from layertap.models.errors import LoadError, escape, label_failures, note_cause
from layertap.models.grammar import CHECKPOINT_HINT, get_base_name, refuse_adapter

INDEX = ".index.json"
SHARDS = (".safetensors", ".bin")
FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
# The first of these keys is read. Averaged weights come first, because models are evaluated with them.
AVERAGED = ("state_dict_ema", "model_ema_state_dict", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema")
PLAIN = (
    *("state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net", "network"),
    *("module", "weights", "params"),
)
SWAPPED = "message_hub"  # in files with this key state_dict holds the averaged weights
PARALLEL = "module."  # the prefix of DistributedDataParallel, DataParallel and averaged models
COMPILED = "_orig_mod"  # torch.compile puts this before the names of a compiled module
COUNTERS = frozenset({"n_averaged", "steps"})  # counters that averaged models save with their weights
MIN_SHARE = 0.5  # the share of a module's names that must occur under a prefix for it to count as one
MAX_DEPTH = 3
MAX_SHOWN = 3
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # options of the hub's libraries
Container = Callable[[], object]
_lock = Lock()  # torch's list of safe globals is process-wide


class StateDict(dict[str, Tensor]):
    """Tensors by name, and where they are from."""

    key: str = ""  # the dictionary in the file that held them
    prefix: str = ""  # that was removed from their names
    unread: tuple[str, ...] = ()  # names of the file's other entries
    shared_names: Mapping[str, str] = MappingProxyType({})  # for each name left out, another name of the same tensor

    def rename(self, shorten: Callable[[str], str | None], prefix: str) -> StateDict:
        """The tensors under other names; those whose new name is None are unread."""
        names = {name: shorten(name) for name in self}
        renamed = StateDict((new, self[name]) for name, new in names.items() if new is not None)
        renamed.key, renamed.prefix = self.key, self.prefix + prefix
        renamed.unread = (*self.unread, *(name for name, new in names.items() if new is None))
        pairs = ((shorten(name), shorten(other)) for name, other in self.shared_names.items())
        renamed.shared_names = {name: other for name, other in pairs if name is not None and other is not None}
        return renamed

    def take_prefix(self, prefix: str) -> StateDict:
        """The tensors whose names begin with a prefix, which is removed; LoadError if there are none."""
        if not any(name.startswith(prefix) for name in self):
            firsts = Counter(f"{name.partition('.')[0]}." for name in self if "." in name)
            hint = f"they begin with {', '.join(escape(first) for first, _ in firsts.most_common(3))}" if firsts else ""
            raise LoadError(f"no tensor of the checkpoint has a name that begins with {escape(prefix)}", hint=hint)
        return self.rename(lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None, prefix)


@contextmanager
def wrap_errors(detail: str, hint: str = "", note: str = "") -> Iterator[None]:
    """Turn any exception of others' code into a LoadError with our text and the exception's class."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        refusal = LoadError(f"{detail} ({type(error).__name__}){note}", hint=hint)
        note_cause(refusal, error)
        raise refusal from error


@label_failures("weights")
def read_checkpoint(path: Path | str, prefix: str = "") -> StateDict:
    """The tensors of a checkpoint by name, on the CPU; code in it is never run, other parts of it are not read.

    ``path`` is a file, an index of shards, or a folder with either as the hub lays it out.
    Of a training script's dictionaries the first that holds a model's tensors is read, averaged weights first, or the
    one at ``prefix``; the prefixes of torch.compile and data parallelism are removed.
    Raises LoadError, which names the file without its directory.
    """
    shown = escape(get_base_name(str(path)))
    state = _find_state_dict(_read(Path(path), shown), shown, prefix)
    if any(COMPILED in name.split(".") for name in state):
        part = re.compile(rf"\b{COMPILED}\.")
        state = state.rename(lambda name: part.sub("", name), f"{COMPILED}.")
    while any("." in name for name in state) and all(name.startswith(PARALLEL) or name in COUNTERS for name in state):
        state = state.take_prefix(PARALLEL)
    return state


def find_weights(folder: Path, files: Sequence[str] = FILES) -> Path:
    """The file of a folder's weights, or their index: the first of ``files`` that exists; LoadError if none does."""
    for name in files:
        if (folder / name).is_file():
            return folder / name
    refuse_adapter(folder)
    detail = f"{escape(folder.name)} holds no {files[0]}"
    raise LoadError(detail, hint=f"it takes one of {', '.join(files)}; or give the path of another file")


def _read(path: Path, shown: str) -> object:
    """The contents of a file, of an index's shards, or of the weights in a folder."""
    if path.is_dir():
        path = find_weights(path)
    if path.name.endswith(INDEX) and path.is_file():
        return _join_shards(path)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise LoadError(f"checkpoint {shown} is of a kind that is not read", hint=CHECKPOINT_HINT)
    if not path.exists():
        raise LoadError(f"there is no checkpoint {shown} where the configuration says")
    with wrap_errors(f"checkpoint {shown} could not be read as plain tensors", CHECKPOINT_HINT):
        return read(path)


def _join_shards(index: Path) -> StateDict:
    """The tensors of the shards beside an index; LoadError if it is no index, or names shards that are elsewhere."""
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
    """Replaces an unpickled object of any class; ``pickled_name`` is the class's name, the contents are dropped.

    If the pickle fills the object like a dictionary or a list, ``container`` makes one to replace it.
    """

    pickled_name = ""
    container: Container | None = None

    def __new__(cls, *args: object) -> Any:
        """An empty object, whatever the class would be called with."""
        return super().__new__(cls) if cls.container is None else cls.container()

    def __init__(self, *args: object) -> None:
        """Take whatever the class would be called with."""

    def __setstate__(self, state: object) -> None:
        """Ignore the pickled state."""


def _read_pickle(path: Path) -> object:
    """A file that torch.save wrote: tensors, numbers, strings, lists and dictionaries; all else is a Placeholder.

    Tensors are memory-mapped: their bytes are read on use. Files of torch before 1.6 are read whole, and may not hold
    other objects. Raises whatever torch.load does; LoadError for a TorchScript archive.
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
            # No class or function that the file names is imported: each becomes a placeholder, which does nothing.
            placeholders: list[Any] = [(_make_placeholder(name, containers.get(name)), name) for name in names]
            try:
                with safe_globals(placeholders):
                    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:
                # Only subclasses of dict or list are filled, so torch's error shows which placeholder must be one.
                message = str(error)
                name = next((each for each in names if f"<class '{each}'>" in message), None)
                if name is None or name in containers:
                    raise
                containers[name] = list if "lists" in message else OrderedDict


def _make_placeholder(name: str, container: Container | None) -> type[Placeholder]:
    """A placeholder class that has the original's name, for error messages."""
    module, _, last = name.rpartition(".")
    fields = {"pickled_name": name, "container": staticmethod(container) if container else None}
    return type(last, (Placeholder,), {"__module__": module, "__qualname__": last, **fields})


def _find_state_dict(loaded: object, shown: str, prefix: str = "") -> StateDict:
    """The state dict in a loaded file: the one under a key that training scripts use, or the one at ``prefix``.

    A prefix is matched against names in the file: first keys of nested dictionaries, then the beginning of names.
    LoadError if there is no dictionary of tensors.
    """
    prefix = prefix and f"{prefix.removesuffix('.')}."
    outer, keys = loaded, list[str]()
    while isinstance(outer, dict) and isinstance(outer.get(key := prefix.partition(".")[0]), dict):
        outer, prefix = outer[key], prefix.partition(".")[2]
        keys.append(key)
    path = _find_path(outer, ())
    if path is None:
        raise _make_refusal(outer, shown)
    found: Any = loaded
    unread = list[str]()
    for depth, key in enumerate(path := (*keys, *path)):
        unread += [".".join((*path[:depth], str(other))) for other in found if other != key]
        found = found[key]
    state = found if isinstance(found, StateDict) else StateDict(found)
    state.key, state.unread = ".".join(path), tuple(unread)
    return state.take_prefix(prefix) if prefix else state


def _find_path(value: object, path: tuple[str, ...]) -> tuple[str, ...] | None:
    if not isinstance(value, dict) or len(path) > MAX_DEPTH:
        return None
    if value and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items()):
        return path
    keys = (*PLAIN, *AVERAGED) if SWAPPED in value else (*AVERAGED, *PLAIN)
    paths = (_find_path(value.get(key), (*path, key)) for key in keys)
    return next((each for each in paths if each is not None), None)


def _make_refusal(loaded: object, shown: str) -> LoadError:
    entries: Mapping[Any, object] = loaded if isinstance(loaded, dict) else {}
    for key, value in {"": loaded, **{key: entries.get(key) for key in (*PLAIN, *AVERAGED)}}.items():
        if isinstance(value, Placeholder):
            name = escape(value.pickled_name)
            detail = f"checkpoint {shown} holds a pickled object of {name}, which is code, instead of its tensors"
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
    """The code that extracts the tensors from a pickled module; only for trusted files."""
    return (
        f"convert it where you trust it, for this runs its code: import torch; module = {load}; "
        "torch.save(module.state_dict(), 'weights.pth')"
    )


def fit_names(state: StateDict, wanted: Collection[str]) -> StateDict:
    """Remove the prefix under which most of a module's names occur, if there is one.

    Tensors without the prefix become unread. LoadError if several prefixes fit equally well.
    """
    starts = ((name, start) for name in state for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))))
    counts = Counter(name[:start] for name, start in starts if name[start:] in wanted)
    most = max(counts.values(), default=0)
    if counts[""] == most or most < MIN_SHARE * len(wanted):
        return state
    best = [prefix for prefix, count in counts.items() if count == most]
    if len(best) > 1:
        hint = f"type prefix: {' or '.join(map(escape, best))}"
        raise LoadError(f"the checkpoint has the model's tensors {len(best)} times, under several prefixes", hint=hint)
    return state.take_prefix(best[0])


READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    **dict.fromkeys((".pth", ".pt", ".ckpt", ".bin", ".tar"), _read_pickle),
}
