"""The state dict within what a training script saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from layertap.models.errors import LoadError, escape
from layertap.models.sources.grammar import CHECKPOINT_HINT
from layertap.models.weights.names import StateDict
from layertap.models.weights.pickles import Placeholder, describe_conversion

# Which dictionary is read: the first of these. Averaged weights come before others: they are what is evaluated.
AVERAGED = ("state_dict_ema", "model_ema_state_dict", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema")
PLAIN = (
    *("state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net", "network"),
    *("module", "weights", "params"),
)
SWAPPED = "message_hub"  # MMEngine, which has this, exchanges the two: its state_dict is the averaged one
MAX_DEPTH = 3
MAX_SHOWN = 3


def find_state_dict(loaded: object, shown: str, prefix: str = "") -> StateDict:
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
    state = StateDict.wrap(outer)  # type: ignore[arg-type]
    state.key = ".".join((*keys, *path))
    if isinstance(loaded, dict) and state.key:
        state.unread = tuple(_list_unread(loaded, (*keys, *path)))
    return state.take_prefix(prefix) if prefix else state


def list_state_dicts(loaded: object) -> list[str]:
    """Keys of all dictionaries of tensors in what a file holds, other than those of an optimizer."""
    if not isinstance(loaded, dict):
        return []
    inner = ((key, _find_path(value, ())) for key, value in loaded.items() if isinstance(key, str))
    return [".".join((key, *path)) for key, path in inner if path is not None]


def _find_path(value: object, path: tuple[str, ...]) -> tuple[str, ...] | None:
    if not isinstance(value, dict) or len(path) > MAX_DEPTH:
        return None
    if _is_state_dict(value):
        return path
    keys = (*PLAIN, *AVERAGED) if SWAPPED in value else (*AVERAGED, *PLAIN)
    paths = (_find_path(value.get(key), (*path, key)) for key in keys)
    return next((each for each in paths if each is not None), None)


def _is_state_dict(value: dict[Any, Any]) -> bool:
    return bool(value) and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())


def _list_unread(loaded: dict[Any, Any], path: tuple[str, ...]) -> Iterator[str]:
    """What stands beside each dictionary on the way to the one that is read."""
    for depth, key in enumerate(path):
        yield from (".".join((*path[:depth], str(other))) for other in loaded if other != key)
        loaded = loaded[key]


def _make_refusal(loaded: object, shown: str) -> LoadError:
    values = {"": loaded} | ({key: loaded.get(key) for key in (*PLAIN, *AVERAGED)} if isinstance(loaded, dict) else {})
    for key, value in values.items():
        if isinstance(value, Placeholder):
            name = escape(value.pickled_name)
            detail = f"checkpoint {shown} holds a pickled object of {name}, which is code, in place of its tensors"
            load = f"torch.load('FILE', weights_only=False, map_location='cpu'){f'[{key!r}]' if key else ''}"
            return LoadError(detail, hint=describe_conversion(load))
    if others := list_state_dicts(loaded):
        hint = f"type prefix: {' or '.join(escape(f'{key}.') for key in others[:MAX_SHOWN])}"
        return LoadError(f"checkpoint {shown} has its tensors under keys that are not known", hint=hint)
    if isinstance(loaded, dict) and any(isinstance(value, Tensor) for value in loaded.values()):
        return LoadError(f"checkpoint {shown} holds other things beside named tensors", hint=CHECKPOINT_HINT)
    return LoadError(f"checkpoint {shown} holds no dictionary of tensors", hint=CHECKPOINT_HINT)
