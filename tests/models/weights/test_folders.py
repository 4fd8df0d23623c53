"""Folders as the hub lays them out, and shards that an index names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from layertap.models.weights.checkpoints import read_checkpoint


def shards(folder: Path, **files: str) -> Path:
    """Two shards and an index that names what is given."""
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def refused(path: Path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        read_checkpoint(path)
    assert str(path.parent) not in caught.value.detail + caught.value.hint
    return caught.value


def test_shards_of_an_index_and_of_its_folder(tmp_path: Path) -> None:
    """Both give the tensors of all shards."""
    index = shards(tmp_path, a="one.safetensors", b="two.safetensors")
    for path in (index, tmp_path):
        assert {name: value.tolist() for name, value in read_checkpoint(path).items()} == {"a": [1], "b": [1, 1]}


def test_shards_that_are_not_whole(tmp_path: Path) -> None:
    """A shard that is not there, or lacks a tensor, is named."""
    assert "'three.safetensors'" in refused(shards(tmp_path, a="one.safetensors", b="three.safetensors")).detail
    assert "'one.safetensors' lacks" in refused(shards(tmp_path, a="one.safetensors", b="one.safetensors")).detail


@pytest.mark.parametrize("name", ["../one.safetensors", "/one.safetensors", "x/one.safetensors"])
def test_shards_elsewhere(tmp_path: Path, name: str) -> None:
    """An index names only what lies beside it."""
    (tmp_path / "x").mkdir()
    shards(tmp_path / "x", a="one.safetensors")
    assert "beside it" in refused(shards(tmp_path, a=name)).detail


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "transformers:"),
        ({"architecture": "no_such_net"}, "no_such_net"),
        ({"architecture": 3}, "timm:FOLDER/"),
    ],
    ids=str,
)
def test_folder_that_is_not_of_timm(tmp_path: Path, config: object, words: str) -> None:
    """A config.json of another library, of an unknown architecture, or nonsense: the refusal says what to do."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError) as caught:
        build_model(ModelSpec("m", f"timm:{tmp_path}/"))
    assert words in f"{caught.value.detail} {caught.value.hint}"
    assert str(tmp_path.parent) not in f"{caught.value.detail} {caught.value.hint}"
