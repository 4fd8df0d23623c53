"""Where weights lie in a folder as the hub lays it out, and the shards that an index names."""

from __future__ import annotations

import json
from pathlib import Path

from layertap.models.errors import AbsentError, LoadError, escape

ADAPTER_CONFIG = "adapter_config.json"
INDEX = ".index.json"
SHARDS = (".safetensors", ".bin")
FILES = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
)


def find_weights(folder: Path) -> Path:
    """The file of a folder's weights, or their index: the first of ``FILES`` that is there; LoadError."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    refuse_adapter(folder)
    detail = f"{escape(folder.name)} holds no {FILES[0]}"
    raise LoadError(detail, hint=f"it takes one of {', '.join(FILES)}; or give the path of another file")


def refuse_adapter(folder: Path) -> None:
    """AbsentError where a folder holds a PEFT adapter, which is no model by itself."""
    if (folder / ADAPTER_CONFIG).is_file():
        shown = escape(folder.name)
        hint = f"give the source and weights of the model that it was trained beside, and adapter: {folder.name}"
        raise AbsentError(f"{shown} holds a PEFT adapter, which is no model by itself", hint=hint)


def read_index(path: Path) -> dict[Path, list[str]]:
    """The shards beside an index, and the names of tensors in each; LoadError where it is none, or names others."""
    try:
        names: dict[str, str] = json.loads(path.read_text("utf-8"))["weight_map"]
        shards = sorted({str(name) for name in names.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{escape(path.name)} is no index of shards") from error
    if not shards or any(Path(shard).name != shard or not shard.endswith(SHARDS) for shard in shards):
        raise LoadError(f"{escape(path.name)} names shards that are not beside it")
    return {path.parent / shard: [name for name, each in names.items() if each == shard] for shard in shards}
