"""Models of the transformers library from directories, against the library itself with plain hooks and autograd."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.hooks.attach import count_hooks
from layertap.models.inputs.preprocess import preprocess
from layertap.models.plan.plan import Capture
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import survey_shape
from layertap.models.sources import build
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.loading import load_model
from tests.marks import slow
from tests.models.extraction import extract_plan, list_tensors
from tests.oracle import Key, record, seeded
from tests.transformers_nets import POSITIONS, SEP, TEXT, VOCABULARY, net, pictures, saved, texts, tokenizer

Rows = dict[str, Tensor]
LENGTH = 8


def pairs(rows: int) -> Rows:
    """Padded texts, whose second halves are of another type."""
    found = texts(rows, LENGTH, padded=True)
    return found | {"token_type_ids": (torch.arange(LENGTH) >= LENGTH // 2) * found["attention_mask"]}


FAMILIES: dict[str, Callable[[], Rows]] = {
    **dict.fromkeys(("bert", "classifier", "roberta"), lambda: pairs(3)),
    **dict.fromkeys(("distilbert", "gpt2", "clip_text"), lambda: texts(3, LENGTH, padded=True)),
    **dict.fromkeys(("clip_picture", "vit", "deit", "registers", "backbone"), lambda: pictures(3)),
    "clip": lambda: {name: rows[1:2] for name, rows in (texts(2, LENGTH, padded=True) | pictures(2)).items()},
}


def loaded(folder: Path, replicas: int = 1, **fields: Any) -> LoadedModel:
    return load_model(ModelSpec("m", f"transformers:{folder}", device="cpu", **fields), replicas)


def refused(folder: Path | str, **fields: Any) -> str:
    """What a refusal says, once it is sure that no directory is in it."""
    with pytest.raises(LoadError) as caught:
        load_model(ModelSpec("m", f"transformers:{folder}", device="cpu", **fields))
    said = caught.value.detail + " | " + caught.value.hint
    assert "/" not in said
    return said


def shapes(model: LoadedModel, rows: Rows) -> Any:
    return survey_shape(model, tuple(tuple(rows[spec.name].shape[1:]) for spec in model.inputs))


def extracted(model: LoadedModel, rows: Rows, *names: str) -> dict[str, Tensor]:
    catalog = shapes(model, rows)
    plan = make_plan([parse_selector(name) for name in names], catalog)
    found = extract_plan(model, rows, plan, catalog, 8)
    return {result.key: found[result.capture].values for result in plan.results}


def everything(model: LoadedModel, rows: Rows) -> dict[Key, Tensor]:
    """Every tensor that enters or leaves any module, as the project sees it."""
    catalog = shapes(model, rows)
    captures = {
        (point.layer, point.call, point.path, point.site): Capture(point, info, Reduction())
        for point, info in list_tensors(catalog, "output", "input")
    }
    share = RequestSlice(0, len(next(iter(rows.values()))), frozenset(captures.values()))
    taken = model.run(model.replicas[0], [rows], [share]).select(share)
    return {key: taken[capture].values for key, capture in captures.items()}


LEVELS = {"bert": (), "gpt2": pytest.mark.slow, "vit": pytest.mark.slow, "clip": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LEVELS.get(name, pytest.mark.hard)) for name in FAMILIES])
def test_every_layer(tmp_path: Path, name: str) -> None:
    """Whatever enters or leaves any module has the bits that a plain hook sees in the library's own model."""
    saved(name, tmp_path)
    plain = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    rows = FAMILIES[name]()
    module = plain.from_pretrained(tmp_path).eval()
    for parameter in module.parameters():  # aligned as ours are: on some machines bits depend on where a file has them
        parameter.data = parameter.data.clone()
    module.config.use_cache = False
    expected = record(module, **rows)
    found = everything(loaded(tmp_path), rows)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value if value.is_floating_point() else value.to(found[key].dtype)), key


def test_nothing_beside_what_is_computed(tmp_path: Path) -> None:
    """A model configured to return caches and hidden states, as tuples, returns what it computes, by name."""
    saved("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_cache": True, "return_dict": False, "output_hidden_states": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loaded(tmp_path)
    assert {info.path for info in model.catalog.layers["."].calls[0].output.tensors} == {("logits",)}
    assert model.module.training is False
    assert (model.hooks, count_hooks(model.module)) == (0, 0)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt2", "transformer.h.{}.attn"),
        slow("classifier", "bert.encoder.layer.{}.attention.self"),
        slow("distilbert", "transformer.layer.{}.attention"),
        slow("vit", "vit.layers.{}.attention"),
        slow("clip_text", "text_model.encoder.layers.{}.self_attn"),
    ],
)
def test_attention(tmp_path: Path, name: str, layers: str) -> None:
    """Attention is what the library returns of the same model that was told to compute it in the open."""
    saved(name, tmp_path)
    rows = FAMILIES[name]()
    plain = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    twin = plain.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = twin(**rows, output_attentions=True).attentions
    model = loaded(tmp_path)
    for number, weights in enumerate(expected):
        (found,) = extracted(model, rows, f"{layers.format(number)}:attention").values()
        torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)


TOKENS = ("input_ids", (32,), (0, VOCABULARY))
MASK = ("attention_mask", (32,), (1, 2))
TYPES = ("token_type_ids", (32,), (0, 2))


@pytest.mark.parametrize(
    ("name", "inputs", "prefix"),
    [
        ("bert", [(*TOKENS, POSITIONS), (*MASK, POSITIONS), (*TYPES, POSITIONS)], 0),
        slow("roberta", [(*TOKENS, 38), (*MASK, 38), (*TYPES, 38)], 0),
        slow("distilbert", [(*TOKENS, POSITIONS), (*MASK, POSITIONS)], 0),
        slow("clip_picture", [("pixel_values", (3, 32, 32), None, None)], 1),
        ("registers", [("pixel_values", (3, 32, 32), None, None)], 4),
    ],
)
def test_what_a_model_takes(tmp_path: Path, name: str, inputs: list[Any], prefix: int) -> None:
    """Inputs follow from the class and its configuration, prefix tokens from the names of parameters."""
    saved(name, tmp_path)
    model = loaded(tmp_path)
    assert [(spec.name, spec.shape, spec.values, spec.longest) for spec in model.inputs] == inputs
    assert model.prefix_tokens == prefix
    assert model.preprocess is None
    assert (model.text is None) == (inputs[0][0] == "pixel_values")
    assert model.weights == "as saved"


VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
SHORT_SIDE = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "clip of old": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 36, "crop_size": 32, "resample": 3},
    "vit": {**VIT, "resample": 2},
    "short side": SHORT_SIDE,
    "not rescaled": {**VIT, "do_rescale": False},
}


@pytest.mark.parametrize("fields", [{}, {"image_backend": "pil"}, {"decode": "fast"}], ids=str)
@pytest.mark.parametrize("case", PROCESSORS)
def test_preprocessing(tmp_path: Path, case: str, fields: dict[str, Any]) -> None:
    """Pixels are those of the processor that AutoImageProcessor makes, or, by steps of our own, of Pillow's."""
    saved("vit", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[case]))
    how = loaded(tmp_path, **fields).preprocess
    assert how is not None
    assert isinstance(how, PreprocessSpec) is bool(fields)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    backend = {"backend": "pil"} if fields else {}
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, **backend)
    wanted = theirs(image, return_tensors="pt")["pixel_values"][0]
    found = preprocess(image, how) if isinstance(how, PreprocessSpec) else how.make_row(image)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)


def test_inputs_that_only_a_person_can_tell(tmp_path: Path) -> None:
    """A model of sounds asks for its inputs, and takes them from the configuration."""
    module = saved("wave", tmp_path)
    assert "add inputs:" in refused(tmp_path)
    model = loaded(tmp_path, inputs=(InputSpec("input_values", (400,)),))
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    found = extracted(model, {"input_values": sound}, ".[last_hidden_state]")[".[last_hidden_state]"]
    assert torch.equal(found, module(sound).last_hidden_state)


@pytest.mark.slow
def test_seed(tmp_path: Path) -> None:
    """A seed gives the library's own parameters, drawn under it."""
    module = saved("bert", tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        drawn = type(module)(type(module.config).from_pretrained(tmp_path))
    assert loaded(tmp_path, weights="random:7").digest == digest_weights(drawn, saved_only=True)


@pytest.mark.parametrize("change", ["missing", "of another shape"])
def test_weights_that_do_not_fit(tmp_path: Path, change: str) -> None:
    """Weights that the library would draw at random are refused, by name."""
    saved("classifier", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    value = state.pop("classifier.weight")
    if change == "of another shape":
        state["classifier.weight"] = value[:2].clone()
    save_file(state, file, metadata={"format": "pt"})
    assert f"{change}: 'classifier.weight'" in refused(tmp_path)


def test_class_of_a_directory(tmp_path: Path) -> None:
    """The class is the one that wrote the directory, else AutoModel's; code beside it is never run."""
    saved("classifier", tmp_path)
    assert type(loaded(tmp_path).module) is transformers.BertForSequenceClassification
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own", "AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(loaded(tmp_path, weights="random:0").module) is transformers.BertModel
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    assert "could not be built" in refused(tmp_path, weights="random:0")
    assert not marker.exists()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory, no weights in it, an unknown name for weights, no library: each says what to do."""
    folder = tmp_path / "net"
    module = saved("bert", folder)
    assert "no directory" in refused(tmp_path / "nowhere")
    assert "random:SEED" in refused(folder, weights="IMAGENET1K_V1")
    assert "'file.pth'" in refused(folder, weights=str(tmp_path / "file.pth"))
    (folder / "model.safetensors").unlink()
    torch.save({"step": 3}, folder / "optimizer.bin")
    assert "no model.safetensors" in refused(folder)
    torch.save(module.state_dict(), folder / "pytorch_model.bin")
    assert loaded(folder).digest == digest_weights(module, saved_only=True)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert "'model.safetensors' could not be read" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "could not be built" in refused(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "layertap[transformers]" in refused(folder)


@pytest.mark.slow
def test_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is the same wherever its directory is; another tokenizer or another setting makes it another."""
    monkeypatch.chdir(tmp_path)
    folder = Path("one")
    saved("bert", folder)
    before = loaded(folder)
    tokenizer(folder)
    known = loaded(folder)
    shutil.copytree(folder, "two")
    assert loaded(Path("two")).identity == known.identity
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 4.0}))
    changed = loaded(folder)
    assert len({before.identity, known.identity, changed.identity}) == 3
    assert before.digest == known.digest == changed.digest


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


@pytest.mark.slow
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


SMALL = TEXT | {"num_key_value_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "first_k_dense_replace": 1}
MASKED: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), True),
    "asks for the name of its attention": (
        lambda: transformers.DeepseekV32Model(transformers.DeepseekV32Config(**SMALL, **LATENT, **EXPERTS, **INDEX)),
        True,
    ),
    "causal only with a mask": (
        lambda: transformers.Aimv2TextModel(transformers.Aimv2TextConfig(**TEXT, eos_token_id=SEP)),
        False,
    ),
}


@pytest.mark.parametrize("kind", MASKED)
def test_attention_has_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Attention gets a mask even if nothing is padded, unless that changes values, which are the library's."""
    make, masked = MASKED[kind]
    net = seeded(make(), 0)
    net.save_pretrained(tmp_path)
    plain = type(net).from_pretrained(tmp_path, dtype=torch.float32).eval()
    module = build.build_model(ModelSpec("m", f"transformers:{tmp_path}", device="cpu")).module
    usual, masks = torch.nn.functional.scaled_dot_product_attention, set[bool]()

    def attend(*args: Any, **options: Any) -> Tensor:
        masks.add(options.get("attn_mask") is not None)
        return usual(*args, **options)

    rows = texts(2, LENGTH, padded=False)
    with torch.no_grad():
        expected = plain(**rows).last_hidden_state
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        found = module(**rows).last_hidden_state
    assert masks == {masked}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
