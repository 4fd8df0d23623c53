"""Checkpoints on disk, read as plain tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import CHECKPOINT_HINT, get_base_name

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
    return _unwrap_state_dict(loaded, shown)


class _StateDict(OrderedDict[str, Tensor]):
    """Tensors by name; ``shared_names`` has, for each one that was left out, the name of the same tensor."""

    shared_names: dict[str, str]


def _read_safetensors(path: Path) -> _StateDict:
    with safe_open(path, framework="pt") as file:
        state = _StateDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary
        state.shared_names = dict(file.metadata() or {})
    return state


def _read_pickle(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _unwrap_state_dict(loaded: object, shown: str) -> dict[str, Tensor]:
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


READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    ".pth": _read_pickle,
    ".pt": _read_pickle,
}
