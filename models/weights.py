"""Weights: where they come from, checkpoints on disk, and a digest of what a module holds."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from layertap.models.errors import LoadError, quoted

SHOWN_KEYS = 3


@dataclass(frozen=True)
class Origin:
    """Where weights come from: a seed, a checkpoint, or, with neither, a name that the source knows.

    ``label`` is for people: it never holds a directory.
    """

    label: str
    seed: int | None = None
    path: Path | None = None


def origin(text: str) -> Origin:
    """What a configuration's ``weights`` means.

    Raises LoadError for a seed that is no whole number and for a file of a kind that is not read.
    """
    kind, _, rest = text.partition(":")
    if kind == "random":
        return Origin(text, seed=_seed(rest))
    if Path(text).suffix.lower() in READERS:
        return Origin(base_name(text), path=Path(text))
    if base_name(text) != text:
        raise LoadError(f"weights {quoted(base_name(text))} are of a kind that is not read", hint=CHECKPOINT_HINT)
    return Origin(text)


class _Drawing:
    """Who draws from the process's one generator: any number without a seed, or one with a seed and nobody else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawing = 0
        self._seeded = False

    @contextmanager
    def place(self, *, alone: bool) -> Iterator[None]:
        """Wait for a place and hold it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._seeded and not (alone and self._drawing))
            self._drawing += 1
            self._seeded = alone
        try:
            yield
        finally:
            with self._changed:
                self._drawing -= 1
                self._seeded = False
                self._changed.notify_all()


_DRAWING = _Drawing()  # models are constructed in threads of their own


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Construct a module inside: the CPU's random numbers start at ``seed``, and the process's own are left alone."""
    with _DRAWING.place(alone=seed is not None), torch.random.fork_rng(devices=[]):
        if seed is not None:
            # torch.manual_seed would reach every accelerator's generator too, which the fork does not cover.
            torch.default_generator.manual_seed(seed)
        yield


def read_checkpoint(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file by name, on the CPU; code in it is never run.

    ``{"state_dict": …}`` and ``{"model": …}`` are unwrapped, a ``module.`` before every name is dropped.
    Raises LoadError, which names the file without its directory.
    """
    shown = quoted(base_name(str(path)))
    read = READERS.get(Path(path).suffix.lower())
    if read is None:
        raise LoadError(f"checkpoint {shown} is of a kind that is not read", hint=CHECKPOINT_HINT)
    try:
        loaded = read(Path(path))
    except FileNotFoundError as error:
        raise LoadError(f"there is no checkpoint {shown} where the configuration says") from error
    except Exception as error:
        detail = f"checkpoint {shown} could not be read as plain tensors ({type(error).__name__})"
        raise LoadError(detail, hint=CHECKPOINT_HINT) from error
    return _state(loaded, shown)


def load_into(module: nn.Module, state: Mapping[str, Tensor], label: str) -> None:
    """Copy a state dict into a module, every name and shape matched; each tensor keeps the module's dtype.

    Raises LoadError with a few of the names that differ.
    """
    try:
        _load(module, state)
    except (RuntimeError, ValueError) as error:
        detail = f"weights {quoted(label)} do not fit the architecture: {_differences(module, state)}"
        raise LoadError(detail, hint=FIT_HINT) from error


def digest(module: nn.Module) -> str:
    """SHA-256, in hex, of all parameters and buffers: name, dtype, shape and little-endian bytes of each, by name.

    Equal on every machine for equal weights, whatever device they are on and however they came there.
    """
    hasher = hashlib.sha256()
    # Buffers that are not persistent are no part of the state dict, but of what the model computes.
    tensors = {**module.state_dict(), **dict(module.named_buffers(remove_duplicate=False))}
    for name, value in sorted(tensors.items()):
        # A module's extra state may be any object, and only tensors have bytes that are the same everywhere.
        if isinstance(value, Tensor):
            header = [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            hasher.update(json.dumps(header).encode())
            hasher.update(_bytes(value))
    return hasher.hexdigest()


def base_name(text: str) -> str:
    """The last part of a path of either kind, or the text itself."""
    return PureWindowsPath(text).name


def _seed(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text[:20]) < 2**64 and len(text) <= 20:
        return int(text)
    raise LoadError("weights random:SEED needs a whole number from 0 to 2**64 - 1", hint="type random:0")


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _torch_load(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _state(loaded: object, shown: str) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded:
        raise LoadError(f"checkpoint {shown} holds no dictionary of tensors", hint=CHECKPOINT_HINT)
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()):
        raise LoadError(f"checkpoint {shown} holds other things beside named tensors", hint=CHECKPOINT_HINT)
    if all(name.startswith("module.") for name in loaded):
        consume_prefix_in_state_dict_if_present(loaded, "module.")
    return loaded


def _load(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        module.load_state_dict(state)
    except ValueError:
        # torchvision's MNASNet refuses tensors without the version of its class, and safetensors has no place for it.
        versioned: Any = OrderedDict(state)
        versioned._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
        module.load_state_dict(versioned)


def _differences(module: nn.Module, state: Mapping[str, Tensor]) -> str:
    own = module.state_dict()
    shapes = [
        f"{quoted(name)} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    kinds = {
        "missing": [quoted(name) for name in own if name not in state],
        "unexpected": [quoted(name) for name in state if name not in own],
        "of another shape": shapes,
    }
    return "; ".join(f"{kind}: {few(names)}" for kind, names in kinds.items() if names)


def few(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - SHOWN_KEYS
    return ", ".join(names[:SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


CHECKPOINT_HINT = (
    "give a .safetensors file, or a .pth or .pt file that torch.save(module.state_dict(), …) wrote, or random:SEED"
)
FIT_HINT = "for another number of classes or another variant, write a factory and type python:package.module:factory"
READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": load_file,
    ".pth": _torch_load,
    ".pt": _torch_load,
}
