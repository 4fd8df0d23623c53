"""Checkpoints on disk, read as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import CHECKPOINT_HINT, get_base_name
from layertap.models.weights.folders import INDEX, find_weights, read_index
from layertap.models.weights.names import StateDict, drop_wrapper_names
from layertap.models.weights.pickles import read_pickle
from layertap.models.weights.wrappers import find_state_dict


@label_failures("weights")
def read_checkpoint(path: Path | str, prefix: str = "") -> StateDict:
    """The tensors of a checkpoint by name, on the CPU; code in it is never run, other parts of it are not read.

    It is a file, an index of shards, or a folder with either as the hub lays it out.
    Out of a training script's dictionaries comes the first that holds a model's tensors, averaged ones before others,
    or those at ``prefix``; what torch.compile and data parallelism put before names is taken off.
    Raises LoadError, which names the file without its directory.
    """
    shown = escape(get_base_name(str(path)))
    return drop_wrapper_names(find_state_dict(_read(Path(path), shown), shown, prefix))


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
    state = StateDict()
    for shard, names in read_index(index).items():
        shown = escape(shard.name)
        tensors = find_state_dict(_read(shard, shown), shown)
        if not tensors.keys() >= set(names):
            raise LoadError(f"{shown} lacks tensors that {escape(index.name)} says it has", hint="download it again")
        state = state.add(tensors)
    return state


def _read_safetensors(path: Path) -> StateDict:
    with safe_open(path, framework="pt") as file:
        state = StateDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary
        state.shared_names = dict(file.metadata() or {})
    return state


READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    **dict.fromkeys((".pth", ".pt", ".ckpt", ".bin", ".tar"), read_pickle),
}
