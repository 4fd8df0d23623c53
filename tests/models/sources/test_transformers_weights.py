"""Directories of transformers in many forms: the weights are those that the library gives in a process of its own."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from layertap.models.errors import LoadError
from layertap.models.sources import build
from layertap.models.spec import InputSpec, ModelSpec
from tests.models.weights import plain_weights
from tests.models.weights.plain_weights import SEED, Plain
from tests.oracle import seeded
from tests.transformers_nets import NETS, TEXT, VOCABULARY, net, saved

LLAMA = transformers.LlamaConfig
XGLM = {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48}
pytestmark = pytest.mark.slow


def _llama(tied: bool) -> Any:
    config = LLAMA(**TEXT, num_key_value_heads=2, tie_word_embeddings=tied)
    return seeded(transformers.LlamaForCausalLM(config), 3)


def _as(dtype: torch.dtype, make: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda folder: make().to(dtype).save_pretrained(folder)


def _old_names(folder: Path) -> None:
    """Names of layer norms as the first checkpoints had them."""
    saved("bert", folder)
    file = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = load_file(file)
    for new, name in old.items():
        state = {key.replace(new, name): value for key, value in state.items()}
    save_file(state, file, {"format": "pt"})


def _read_as(name: str, architecture: str) -> Callable[[Path], None]:
    """A directory that another class than its own is to read."""

    def made(folder: Path) -> None:
        saved(name, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))

    return made


def _rounded(folder: Path) -> None:
    """Weights in float32 whose configuration wants bfloat16."""
    saved("vit", folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))


FORMS: dict[str, Callable[[Path], Any]] = {
    **{
        name: lambda folder, name=name: saved(name, folder)  # type: ignore[misc]
        for name in ("bert", "gpt2", "vit", "clip", "chinese_clip", "mixing", "registers", "depth", "wave")
    },
    **{f"{name}_bf16": _as(torch.bfloat16, lambda name=name: net(name)) for name in NETS},  # type: ignore[misc]
    "clip_f16": _as(torch.float16, lambda: net("clip")),
    "llama_bf16": _as(torch.bfloat16, lambda: _llama(tied=False)),
    "llama_tied_bf16": _as(torch.bfloat16, lambda: _llama(tied=True)),
    "xglm_bf16": _as(torch.bfloat16, lambda: seeded(transformers.XGLMModel(transformers.XGLMConfig(**XGLM)), 2)),
    "rounded": _rounded,
    "old_names": _old_names,
    "shards": lambda folder: net("bert").save_pretrained(folder, max_shard_size="20KB"),
    "head_for_base": _read_as("classifier", "BertModel"),
    "base_for_head": _read_as("gpt2_base", "GPT2LMHeadModel"),
}
NETS_TOO = {"gpt2_base": lambda: transformers.GPT2Model(NETS["gpt2"]().config)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("forms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.transformers_nets.NETS", NETS | NETS_TOO)
        for name, make in FORMS.items():
            make(whole / name)
    return whole


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Plain]:
    return plain_weights.plain(*(folder / name for name in FORMS))


def _built(folder: Path, **fields: Any) -> Any:
    inputs = (InputSpec("x", (4,)),)  # nothing runs here
    return build.build_model(ModelSpec("m", f"transformers:{folder}", device="cpu", inputs=inputs, **fields)).module


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_library(folder: Path, plain: dict[str, Plain], form: str) -> None:
    """Every parameter and buffer has the dtype, the shape and the bits that from_pretrained gives for float32."""
    assert plain_weights.facts(_built(folder / form)) == plain[form].saved


@pytest.mark.parametrize("form", ["bert", "gpt2", "clip", "clip_bf16", "llama_bf16", "mixing_bf16", "vit_bf16"])
def test_random_weights_of_the_library(folder: Path, plain: dict[str, Plain], form: str) -> None:
    """Weights of a seed are those of the class, constructed after manual_seed in a quiet process."""
    assert plain_weights.facts(_built(folder / form, weights=f"random:{SEED}")) == plain[form].random


def from_pretrained() -> Any:
    """A factory that loads as people do."""
    return transformers.LlamaForCausalLM.from_pretrained(FACTORY["folder"], dtype=torch.float32)


def initialized_again() -> Any:
    """A factory that draws weights anew after it loaded them, as people do with a head."""
    return plain_weights.initialized_again(from_pretrained())


FACTORY: dict[str, Path] = {}


def test_a_factory_that_loads(folder: Path, plain: dict[str, Plain]) -> None:
    """A factory may call from_pretrained itself: the weights are the same, and the default dtype is as it was."""
    module = _factory(folder, "from_pretrained")
    assert plain_weights.facts(module) == plain["llama_tied_bf16"].saved
    assert torch.zeros(1).dtype == torch.float32


def test_a_factory_that_initializes_again(folder: Path, plain: dict[str, Plain]) -> None:
    """Weights that a factory loads can be initialized again, by it and by who has the model then."""
    module = _factory(folder, "initialized_again")
    assert plain_weights.facts(module) == plain["llama_tied_bf16"].again != plain["llama_tied_bf16"].saved
    assert not torch.nn.init.zeros_(module.lm_head.weight).any()


def _factory(folder: Path, name: str) -> Any:
    FACTORY["folder"] = folder / "llama_tied_bf16"
    spec = ModelSpec("m", f"python:{__name__}:{name}", "DEFAULT", device="cpu", inputs=(InputSpec("x", (4,)),))
    return build.build_model(spec).module


def test_layers_that_would_be_fused(folder: Path, tmp_path: Path) -> None:
    """A configuration that would change the classes of other models is refused."""
    shutil.copytree(folder / "bert", tmp_path / "bert")
    file = tmp_path / "bert" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fusion_config": {"patch_embeddings": True}}))
    with pytest.raises(LoadError, match="fused layers"):
        _built(tmp_path / "bert")


@pytest.mark.parametrize("name", ["bert", "mixing", "gpt2", "chinese_clip"])
def test_a_weight_that_is_not_the_files(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not hold its file's values, however that came, is refused."""
    kind = type(net(name))
    usual, changed = kind.tie_weights, sorted(dict(net(name).named_parameters()))
    assert changed

    for parameter in changed:

        def tie_weights(self: Any, *args: Any, parameter: str = parameter, **options: Any) -> None:
            usual(self, *args, **options)
            value = self.get_parameter(parameter)
            if not value.is_meta:
                value.data.flatten()[-1:] += 1e-3  # after the weights are in

        monkeypatch.setattr(kind, "tie_weights", tie_weights)
        with pytest.raises(LoadError, match="does not hold the weights"):
            _built(folder / name)
    monkeypatch.undo()
    _built(folder / name)


def test_default_dtype_of_other_threads(folder: Path) -> None:
    """While models are built, a forward in another thread makes tensors of the dtype that it always makes."""
    stop, seen = threading.Event(), set()

    def watch() -> None:
        while not stop.is_set():
            seen.add((torch.get_default_dtype(), torch.tensor(0.5).dtype))

    with ThreadPoolExecutor(3) as pool:
        watching = pool.submit(watch)
        for _ in range(5):
            list(pool.map(lambda name: _built(folder / name), ("llama_bf16", "gpt2", "clip_bf16")))
        stop.set()
        watching.result()
    assert seen == {(torch.float32, torch.float32)}
