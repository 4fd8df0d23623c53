"""Directories of transformers in many forms: the weights are those that the library itself gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.sources import build
from layertap.models.spec import InputSpec, ModelSpec
from tests.oracle import seeded
from tests.transformers_nets import TEXT, net, saved

pytestmark = pytest.mark.slow


def _llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=tied)
    return seeded(transformers.LlamaForCausalLM(config), 3)


def _as(dtype: torch.dtype, make: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda folder: make().to(dtype).save_pretrained(folder)


def _changed(name: str, **fields: Any) -> Callable[[Path], None]:
    """A directory whose configuration says something else than what was saved."""

    def make(folder: Path) -> None:
        saved(name, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return make


def _old_names(folder: Path) -> None:
    """Names of layer norms as the first checkpoints had them."""
    saved("bert", folder)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = load_file(folder / "model.safetensors")
    for new, name in old.items():
        state = {key.replace(new, name): value for key, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


FORMS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(saved, name) for name in ("bert", "gpt2", "chinese_clip", "registers", "wave")},
    **{f"{name}_bf16": _as(torch.bfloat16, partial(net, name)) for name in ("bert", "vit", "mixing", "depth")},
    "clip_f16": _as(torch.float16, partial(net, "clip")),
    "llama_bf16": _as(torch.bfloat16, partial(_llama, tied=False)),
    "llama_tied_bf16": _as(torch.bfloat16, partial(_llama, tied=True)),
    "rounded": _changed("vit", dtype="bfloat16"),
    "old_names": _old_names,
    "shards": lambda folder: net("bert").save_pretrained(folder, max_shard_size="20KB"),
    "head_for_base": _changed("classifier", architectures=["BertModel"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("forms")
    for name, make in FORMS.items():
        make(whole / name)
    return whole


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, tied ones under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _same(found: nn.Module, plain: nn.Module) -> bool:
    ours, theirs = _tensors(found), _tensors(plain)
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == value.dtype and torch.equal(ours[name], value) for name, value in theirs.items()
    )


def _built(folder: Path, **fields: Any) -> Any:
    inputs = (InputSpec("x", (4,)),)  # nothing runs here
    return build.build_model(ModelSpec("m", f"transformers:{folder}", device="cpu", inputs=inputs, **fields)).module


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_library(folder: Path, form: str) -> None:
    """Every parameter and buffer has the dtype, the shape and the bits that from_pretrained gives for float32."""
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder / form).architectures[0])
    assert _same(_built(folder / form), kind.from_pretrained(folder / form, dtype=torch.float32))


@pytest.mark.parametrize("name", ["bert", "mixing"])
def test_a_weight_that_is_not_the_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not hold its file's values, however that came, is refused."""
    kind = type(saved(name, tmp_path))
    usual, names = kind.tie_weights, sorted(dict(net(name).named_parameters()))
    for parameter in (names[0], names[len(names) // 2], names[-1]):

        def tie_weights(self: Any, *args: Any, parameter: str = parameter, **options: Any) -> None:
            usual(self, *args, **options)
            value = self.get_parameter(parameter)
            if not value.is_meta:
                value.data.flatten()[-1:] += 1e-3  # after the weights are in

        monkeypatch.setattr(kind, "tie_weights", tie_weights)
        with pytest.raises(LoadError, match="does not hold the weights"):
            _built(tmp_path)
    monkeypatch.undo()
    _built(tmp_path)
