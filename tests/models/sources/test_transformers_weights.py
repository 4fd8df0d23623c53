"""Directories of transformers in many forms: the weights are those that the library itself gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

SEED = 7
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
    **{
        name: lambda folder, name=name: saved(name, folder)
        for name in ("bert", "gpt2", "clip", "chinese_clip", "registers", "wave")
    },
    **{
        f"{name}_bf16": _as(torch.bfloat16, lambda name=name: net(name))
        for name in ("bert", "gpt2", "clip", "vit", "mixing", "depth")
    },
    "clip_f16": _as(torch.float16, lambda: net("clip")),
    "llama_bf16": _as(torch.bfloat16, lambda: _llama(tied=False)),
    "llama_tied_bf16": _as(torch.bfloat16, lambda: _llama(tied=True)),
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


def _plain(folder: Path) -> tuple[Any, Any]:
    """The class of a directory, and its configuration."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]), config


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_library(folder: Path, form: str) -> None:
    """Every parameter and buffer has the dtype, the shape and the bits that from_pretrained gives for float32."""
    kind, _ = _plain(folder / form)
    assert _same(_built(folder / form), kind.from_pretrained(folder / form, dtype=torch.float32))


@pytest.mark.parametrize("form", ["bert", "clip", "llama_bf16", "mixing_bf16", "vit_bf16"])
def test_random_weights_of_the_library(folder: Path, form: str) -> None:
    """Weights of a seed are those of the class, constructed after manual_seed."""
    kind, config = _plain(folder / form)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        plain = kind(config)
    assert _same(_built(folder / form, weights=f"random:{SEED}"), plain)


FACTORY: dict[str, Path] = {}


def from_pretrained() -> Any:
    """A factory that loads as people do."""
    return transformers.LlamaForCausalLM.from_pretrained(FACTORY["folder"], dtype=torch.float32)


def test_a_factory_that_loads(folder: Path) -> None:
    """A factory may call from_pretrained itself: the weights are the same, and the default dtype is as it was."""
    FACTORY["folder"] = folder / "llama_tied_bf16"
    spec = ModelSpec("m", f"python:{__name__}:from_pretrained", "DEFAULT", "cpu", inputs=(InputSpec("x", (4,)),))
    assert _same(build.build_model(spec).module, from_pretrained())
    assert torch.zeros(1).dtype == torch.float32


@pytest.mark.parametrize("name", ["bert", "mixing", "gpt2", "chinese_clip"])
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


def test_default_dtype_of_other_threads(folder: Path) -> None:
    """While models are built, a forward in another thread makes tensors of the dtype that it always makes."""
    stop, seen = threading.Event(), set()

    def watch() -> None:
        while not stop.is_set():
            seen.add((torch.get_default_dtype(), torch.tensor(0.5).dtype))

    with ThreadPoolExecutor(3) as pool:
        watching = pool.submit(watch)
        for _ in range(3):
            list(pool.map(lambda name: _built(folder / name), ("llama_bf16", "gpt2", "clip_bf16")))
        stop.set()
        watching.result()
    assert seen == {(torch.float32, torch.float32)}
