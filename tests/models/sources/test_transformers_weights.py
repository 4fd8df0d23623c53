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
    **{f"{name}_bf16": _as(torch.bfloat16, partial(net, name)) for name in ("bert", "vit", "mixing")},
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


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_library(folder: Path, form: str) -> None:
    """Every parameter and buffer has the dtype, the shape and the bits that from_pretrained gives for float32."""
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder / form).architectures[0])
    plain = kind.from_pretrained(folder / form, dtype=torch.float32)
    inputs = (InputSpec("x", (4,)),)  # nothing runs here
    module = build.build_model(ModelSpec("m", f"transformers:{folder / form}", device="cpu", inputs=inputs)).module
    ours, theirs = (
        dict(each.named_parameters(remove_duplicate=False)) | dict(each.named_buffers(remove_duplicate=False))
        for each in (module, plain)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name
