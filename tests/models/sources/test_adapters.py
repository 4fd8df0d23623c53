"""Adapters as PEFT saves them, merged here; PEFT's own unmerged model says what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import InputSpec, ModelSpec
from tests import nets, transformers_nets
from tests.oracle import seeded

RANKS: dict[str, Any] = {"r": 4, "lora_alpha": 6}
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(12).reshape(2, 6) % transformers_nets.VOCABULARY


@dataclass(frozen=True)
class Base:
    """A model that is trained: what makes it, how a configuration names it, and a batch."""

    make: Callable[[], nn.Module]
    source: str
    inputs: tuple[InputSpec, ...]
    batch: Tensor
    args: Mapping[str, Any] = field(default_factory=dict)


PIXELS = (InputSpec("x", (3, 32, 32)),)
IDS = (InputSpec("input_ids", (6,), "int64", (0, transformers_nets.VOCABULARY)),)
BASES = {
    "timm": Base(
        lambda: timm.create_model("test_vit", num_classes=4, img_size=32),
        "timm:test_vit",
        PIXELS,
        IMAGE,
        {"num_classes": 4, "img_size": 32},
    ),
    "own": Base(nets.Chain, "python:tests.nets:Chain", PIXELS, IMAGE),
    "bert": Base(lambda: transformers_nets.net("bert"), "transformers:", IDS, TOKENS),
    "gpt2": Base(lambda: transformers_nets.net("gpt2"), "transformers:", IDS, TOKENS),
    "experts": Base(lambda: transformers_nets.net("mixing"), "transformers:", IDS, TOKENS),
}
LINEAR = {**RANKS, "target_modules": ["qkv", "fc1"]}
CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "other ranks and alphas for some, biases": (
        "timm",
        lambda: peft.LoraConfig(
            **LINEAR, rank_pattern={"blocks.0.attn.qkv": 2}, alpha_pattern={"fc1": 16}, bias="lora_only"
        ),
    ),
    "a whole head": ("timm", lambda: peft.LoraConfig(**LINEAR, modules_to_save=["head"])),
    "magnitudes (DoRA)": ("timm", lambda: peft.LoraConfig(**LINEAR, use_dora=True)),
    "convolutions": ("own", lambda: peft.LoraConfig(**RANKS, target_modules=["conv"])),
    "embeddings": ("bert", lambda: peft.LoraConfig(**RANKS, target_modules=["word_embeddings", "query"])),
    "transposed layers": ("gpt2", lambda: peft.LoraConfig(**RANKS, target_modules=["c_attn"], fan_in_fan_out=True)),
    "experts": ("experts", lambda: peft.LoraConfig(**RANKS, target_parameters=["mlp.experts.gate_up_proj"])),
    "IA3": ("timm", lambda: peft.IA3Config(target_modules=["qkv", "fc2"], feedforward_modules=["fc2"])),
    "OFT": ("timm", lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["qkv"])),
}


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT, for itself


def train(module: nn.Module, config: Any) -> Any:
    """A module with an adapter whose every weight has moved."""
    adapted = peft.PeftModel(module, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return adapted.eval()


def compute(module: nn.Module, batch: Tensor) -> Tensor:
    """The output, or the first of several."""
    with torch.no_grad():
        output = module(batch)
    return output if isinstance(output, Tensor) else next(value for value in output.values() if value is not None)


def make_base(name: str, folder: Path) -> tuple[nn.Module, ModelSpec]:
    """A model before its training, and the configuration that serves it."""
    base = BASES[name]
    if base.source == "transformers:":
        module = transformers_nets.saved({"experts": "mixing"}.get(name, name), folder / "base")
        reloaded = type(module).from_pretrained(folder / "base").eval()  # without buffers that are not saved
        return reloaded, ModelSpec("m", f"transformers:{folder}/base", inputs=base.inputs)
    module = seeded(base.make(), 0).eval()
    torch.save(module.state_dict(), folder / "base.pth")
    return module, ModelSpec("m", base.source, f"{folder}/base.pth", inputs=base.inputs, args=base.args)


def adapt(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return ModelSpec(**{**vars(spec), **fields})


def refusal(spec: ModelSpec) -> str:
    with pytest.raises(LoadError) as caught:
        build_model(spec)
    text = f"{caught.value.detail}; {caught.value.hint}"
    assert "/" not in text
    return text


@pytest.mark.parametrize("kind", CONFIGS)
def test_merged_equals_unmerged(tmp_path: Path, kind: str) -> None:
    """The module with the adapter merged computes what PEFT's does, in the same classes; so are its bits."""
    name, configure = CONFIGS[kind]
    module, spec = make_base(name, tmp_path)
    plain = build_model(spec)
    batch = BASES[name].batch
    adapted = train(deepcopy(module), configure())
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = compute(adapted, batch)

    built = build_model(adapt(spec, adapter=str(tmp_path / "adapter")))

    assert (compute(built.module, batch) - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (compute(module, batch) - expected).abs().max() > 1e-3 * expected.abs().max()
    parts = [{part: type(each) for part, each in one.module.named_modules()} for one in (plain, built)]
    assert parts[0] == parts[1]
    assert vars(plain.module).keys() == vars(built.module).keys()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in built.module.modules())
    assert built.weights == f"{plain.weights} + adapter"
    assert built.report is not None
    assert built.report.adapter == "adapter"
    assert digest_weights(built.module) not in {digest_weights(plain.module), digest_weights(module)}
    assert digest_weights(built.module) == digest_weights(adapted.merge_and_unload())


@pytest.mark.parametrize(("prefix", "modules_to_save"), [("", None), ("model.", ["head"])])
def test_a_training_in_one_file(tmp_path: Path, prefix: str, modules_to_save: list[str] | None) -> None:
    """What a training script saved of the whole is merged where adapter_config.json is given, else named."""
    module, spec = make_base("timm", tmp_path)
    adapted = train(module, peft.LoraConfig(**LINEAR, modules_to_save=modules_to_save))
    torch.save({prefix + name: value for name, value in adapted.state_dict().items()}, tmp_path / "lora.pth")
    adapted.peft_config["default"].save_pretrained(str(tmp_path / "adapter"))
    expected = compute(adapted, IMAGE)
    spec = adapt(spec, weights=f"{tmp_path}/lora.pth")

    built = build_model(adapt(spec, adapter=f"{tmp_path}/adapter/"))
    assert (compute(built.module, IMAGE) - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert built.weights == "lora.pth + adapter"
    for text in (refusal(spec), refusal(adapt(spec, strict=False))):
        assert "'lora.pth' has a LoRA adapter that is not merged" in text
        assert "adapter: FOLDER" in text
        assert "lora_alpha" in text
        assert "strict" not in text


def saved(folder: Path, **changes: Any) -> tuple[ModelSpec, Path]:
    """A model and an adapter, whose configuration is then changed."""
    module, spec = make_base("timm", folder)
    train(module, peft.LoraConfig(**LINEAR)).save_pretrained(str(folder / "adapter"))
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapt(spec, adapter=str(folder / "adapter")), folder / "adapter"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "'adapter' is of the type 'PREFIX_TUNING'"),
        ({"r": 8}, "RuntimeError"),
        ({"target_modules": ["nothing"]}, "NoMatchingPeftModuleError"),
        ({"target_modules": ["qkv", "fc1", "fc2"]}, "does not fit the model: 'blocks.0.mlp.fc2.lora_A"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "ValueError"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Another type or rank, layers that are not there, tensors too many, a module to import: all are refused."""
    spec, _ = saved(tmp_path, **changes)
    assert words in refusal(spec)


def test_files(tmp_path: Path) -> None:
    """An adapter given as a model says where it belongs; code in adapter_model.bin is refused, and none at all."""
    spec, folder = saved(tmp_path)
    assert "adapter: adapter" in refusal(ModelSpec("m", f"transformers:{folder}"))
    assert "adapter: adapter" in refusal(adapt(spec, adapter="", weights=f"{folder}/"))
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors" in refusal(spec)
    torch.save(tensors, folder / "adapter_model.bin")
    assert build_model(spec).report is not None
    torch.save(nn.Linear(2, 2), folder / "adapter_model.bin")
    assert "torch.nn.modules.linear.Linear" in refusal(spec)


@pytest.mark.parametrize("name", ["BertModel", "BertForPreTraining"])
def test_a_head_of_another_class(tmp_path: Path, name: str) -> None:
    """A classifier trained beside a model without one is merged with its head, which tells the number of classes."""
    config = transformers.BertConfig(**transformers_nets.TEXT)
    seeded(getattr(transformers, name)(config), 0).save_pretrained(tmp_path / "base")

    def load() -> Any:
        return transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)

    adapted = peft.get_peft_model(load(), peft.LoraConfig(**RANKS, task_type="SEQ_CLS", target_modules=["query"]))
    seeded(adapted, 1).save_pretrained(tmp_path / "adapter")
    expected = compute(peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").eval(), TOKENS)

    built = build_model(ModelSpec("m", f"transformers:{tmp_path}/base", adapter=str(tmp_path / "adapter")))

    torch.testing.assert_close(compute(built.module, TOKENS), expected, rtol=1e-5, atol=1e-5)
