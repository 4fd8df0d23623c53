"""Weights: where they come from, checkpoints on disk, and a digest of what a module holds."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import CHECKPOINT_HINT, get_base_name
from layertap.models.sources.grammar import parse_weights as parse_weights

SHOWN_KEYS = 3
PREFIX = "module."  # of a model that several GPUs trained


@label_failures("weights")
def read_checkpoint(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file by name, on the CPU; code in it is never run.

    ``{"state_dict": …}`` and ``{"model": …}`` are unwrapped, a ``module.`` before every name is dropped.
    Raises LoadError, which names the file without its directory.
    """
    shown = escape(get_base_name(str(path)))
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


@label_failures("weights")
def load_into(module: nn.Module, state: Mapping[str, Tensor], label: str, bits: int = 0) -> None:
    """Copy a state dict into a module, every name and shape matched; each tensor keeps the module's dtype.

    Of tensors that share their values one is enough. What the module holds then is compared with what was given.
    Raises LoadError with a few of the names that differ, or whose floating numbers have less than so many ``bits``.
    """
    whole = _with_shared(module, state)
    try:
        _load(module, whole)
    except (RuntimeError, ValueError) as error:
        detail = f"weights {escape(label)} do not fit the architecture: {_differences(module, whole)}"
        raise LoadError(detail, hint=FIT_HINT) from error
    own, others = module.state_dict(), tuple(_loaded_otherwise(module))
    held = {
        name: value
        for name, value in own.items()
        if name in whole and isinstance(value, Tensor) and not name.startswith(others)
    }
    kept = (name for name, value in held.items() if _bits(value) >= bits and has_same_values(value, whole[name]))
    wrong = sorted(held.keys() - kept)
    for name, other in _tied(held, wrong):
        if not has_same_values(whole[name], whole[other]):
            detail = f"the model has one tensor for {escape(name)} and {escape(other)}, {escape(label)} has two"
            raise LoadError(detail, hint=TIE_HINT)
    check_equal(wrong, escape(label))


def check_equal(names: list[str], shown: str) -> None:
    """LoadError where there are names of tensors that are not as the file has them."""
    if names:
        detail = f"the model does not hold the weights of {shown}: {format_names([escape(name) for name in names])}"
        raise LoadError(detail, hint="load it again")


def has_same_values(held: Tensor, given: Tensor) -> bool:
    """Whether a tensor has exactly the values that were given for it, in its own dtype."""
    wanted = given.to(held.device, held.dtype)
    return held.shape == wanted.shape and torch.equal(*(_flat(value).view(torch.uint8) for value in (held, wanted)))


def digest_weights(module: nn.Module) -> str:
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


def _bytes(value: Tensor) -> memoryview:
    return _flat(value).cpu().view(torch.uint8).numpy().data


def _flat(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1)


def _bits(value: Tensor) -> float:
    return torch.finfo(value.dtype).bits if value.is_floating_point() else math.inf


class _Shared(OrderedDict[str, Tensor]):
    """Tensors by name, and ``kept``: under which names those are that were left out, as others are the same."""

    kept: dict[str, str]


def _safetensors(path: Path) -> _Shared:
    with safe_open(path, framework="pt") as file:
        found = _Shared((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary
        found.kept = dict(file.metadata() or {})
    return found


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
    if all(name.startswith(PREFIX) for name in loaded):
        consume_prefix_in_state_dict_if_present(loaded, PREFIX)
    return loaded


def _with_shared(module: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state dict with the names that were left out because another tensor is the same one.

    The file says which (as safetensors' ``save_model`` has it), or it is so in the module.
    """
    own, kept = module.state_dict(keep_vars=True), getattr(state, "kept", {})
    names = {_place(value): name for name, value in own.items() if name in state}
    further = {}
    for name in own.keys() - state.keys():
        # Names in the file may have a prefix that came off.
        written = kept.get(name) or kept.get(PREFIX + name, "").removeprefix(PREFIX)
        source = written if written in state else names.get(_place(own[name]))
        if source is not None:
            further[name] = state[source]
    if not further:
        return state
    whole: Any = OrderedDict(state)
    if hasattr(state, "_metadata"):
        whole._metadata = state._metadata
    whole.update(further)
    return whole  # type: ignore[no-any-return]


def _place(value: object) -> object:
    """What two tensors have in common where they are the same."""
    if isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def _tied(held: Mapping[str, Tensor], names: list[str]) -> Iterator[tuple[str, str]]:
    """Each of these names with every other of the same tensor."""
    for name in names:
        yield from ((name, other) for other in held if other != name and _place(held[other]) == _place(held[name]))


def _loaded_otherwise(module: nn.Module) -> Iterator[str]:
    """How names of those parts begin that do something of their own with what is loaded into them."""
    for name, part in module.named_modules(remove_duplicate=False):
        own = (type(part)._load_from_state_dict, type(part).load_state_dict)
        usual = all(function.__module__.startswith("torch.") for function in own)
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks or not usual:
            yield f"{name}." if name else ""


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
        f"{escape(name)} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    kinds = {
        "missing": [escape(name) for name in own if name not in state],
        "unexpected": [escape(name) for name in state if name not in own],
        "of another shape": shapes,
    }
    return "; ".join(f"{kind}: {format_names(names)}" for kind, names in kinds.items() if names)


def format_names(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - SHOWN_KEYS
    return ", ".join(names[:SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


FIT_HINT = "for another number of classes or another variant, write a factory and type python:package.module:factory"
TIE_HINT = "give weights that were saved from this architecture, or a factory whose model does not share the tensor"
READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _safetensors,
    ".pth": _torch_load,
    ".pt": _torch_load,
}
