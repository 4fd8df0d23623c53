"""Folders as transformers, sentence-transformers and PEFT leave them, beside what these libraries make of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec, ModelSpec
from tests.oracle import seeded
from tests.own_models.ask import Asker, encode, serving_models
from tests.transformers_nets import PICTURE, TEXT, VOCABULARY, WORDS, tokenizer

LONG = "the red dog sat on the mat and saw a cat and a dog on the red mat"
IDS = torch.tensor([2, 5, 6, 7, 3, 0, 0, 0])
MASK = (IDS > 0).long()
WAVE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
WAVE |= {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_conv_pos_embeddings": 4}


def text(name: str = "BertModel", **options: Any) -> Any:
    """A small encoder of texts."""
    config = getattr(transformers, name.replace("Model", "Config").replace("ForPreTraining", "Config"))
    return seeded(getattr(transformers, name)(config(**TEXT | options)), 0).eval()


def sentences(folder: Path, **options: Any) -> None:
    """A sentence-transformers folder, and the encoder alone beside it."""
    text().save_pretrained(folder / "encoder")
    tokenizer(folder / "encoder")
    transformer = modules.Transformer(str(folder / "encoder"), **options)
    prompts = {"query": "the dog : ", "document": ""}
    parts = [transformer, modules.Pooling(32, "mean")]
    SentenceTransformer(modules=parts, device="cpu", prompts=prompts).save(str(folder))


def adapt(folder: Path, base: Path) -> None:
    """Save a LoRA adapter of the model of ``base`` in a folder."""
    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"], init_lora_weights=False)
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of the versions of the two libraries
        peft.get_peft_model(transformers.BertModel.from_pretrained(base), config).save_pretrained(folder)


@dataclass(frozen=True)
class Folders:
    """A server of folders, and where these are."""

    asker: Asker
    root: Path

    def described(self, name: str) -> dict[str, Any]:
        """``GET /models/NAME``."""
        return self.asker.client.get(f"/models/{name}").json()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """One server for all that load."""
    root = tmp_path_factory.mktemp("folders")
    vit = transformers.ViTConfig(**PICTURE, num_labels=3, problem_type="multi_label_classification")
    seeded(transformers.ViTForImageClassification(vit), 0).save_pretrained(root / "labels")
    sentences(root / "adapted")
    adapt(root / "adapted", root / "adapted" / "encoder")
    SentenceTransformer(str(root / "adapted"), device="cpu").save(str(root / "alone"))
    text().save_pretrained(root / "base")
    text().save_pretrained(root / "plain")
    adapt(root / "plain", root / "base")
    sentences(root / "queries", query_length=6)
    options = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
    text("ModernBertModel", **options).save_pretrained(root / "modern")
    wave = transformers.Wav2Vec2Config(**WAVE, num_conv_pos_embedding_groups=2, feat_extract_norm="layer")
    seeded(transformers.Wav2Vec2Model(wave), 0).eval().save_pretrained(root / "wave")
    whole = text("BertForPreTraining")
    whole.save_pretrained(root / "pairs")
    config = json.loads((root / "pairs" / "config.json").read_text())
    (root / "pairs" / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    (root / "vocab.txt").write_text("\n".join([*WORDS, *(f"[unused{n}]" for n in range(VOCABULARY - len(WORDS)))]))
    transformers.BertTokenizer.from_pretrained(root / "vocab.txt").save_pretrained(root / "pairs")
    named = {
        "modern": (InputSpec("input_ids", (8,), "int64", values=(0, 20)), mask(8)),
        "wave": (InputSpec("input_values", (400,)), mask(400)),
    }
    specs = [
        ModelSpec(each, f"transformers:{root / each}", device="cpu", inputs=named.get(each))
        for each in ("labels", "adapted", "alone", "plain", "queries", "modern", "wave", "pairs")
    ]
    specs.append(ModelSpec("beside", f"transformers:{root}/base", device="cpu", adapter=str(root / "alone")))
    with serving_models(*specs) as asker:
        yield Folders(asker, root)


def mask(size: int) -> InputSpec:
    """The mask beside an input of that many entries."""
    return InputSpec("attention_mask", (size,), "int64", values=(1, 2))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors differ by rounding only."""
    return found.shape == expected.shape and torch.allclose(found, expected, atol=tolerance, rtol=0)


def test_many_labels(folders: Folders) -> None:
    """A class with many labels has a sigmoid for each, in probabilities and in what is differentiated."""
    picture = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module = transformers.ViTForImageClassification.from_pretrained(folders.root / "labels").eval()
    shares = module(picture[None]).logits[0].sigmoid()
    best = int(shares.argmax())
    (gradient,) = torch.autograd.grad(shares[best], picture)
    asked = {"model": "labels", "inputs": [encode(picture.detach())], "encoding": "base64", "method": "saliency"}
    reply = folders.asker.post("/explain", {**asked, "objective": {"kind": "probability"}, "top_classes": 3})
    found = {each["class"]: each for each in reply.body["top_classes"][0]}
    assert {each["activation"] for each in found.values()} == {"sigmoid"}
    assert close(torch.tensor([found[number]["probability"] for number in range(3)]), shares.detach())
    assert close(next(iter(reply.features.values()))[0], gradient.abs().amax(0))
    assert folders.described("labels")["outputs"] == "multi_label_logits"


def embed(folders: Folders, name: str, *texts: str, **fields: Any) -> Tensor:
    """The embeddings of texts."""
    reply = folders.asker.post(
        "/extract", {"model": name, "inputs": [{"text": each} for each in texts], "encoding": "base64", **fields}
    )
    return next(iter(reply.features.values()))


def test_adapter_in_a_sentence_folder(folders: Folders) -> None:
    """An adapter in the transformer's own folder is merged, as sentence-transformers does."""
    theirs = SentenceTransformer(str(folders.root / "adapted"), device="cpu").encode(["the red dog"])
    assert close(embed(folders, "adapted", "the red dog"), torch.from_numpy(theirs), 1e-4)
    assert folders.described("adapted")["checkpoint"]["adapter"] == "adapted"


@pytest.mark.parametrize("name", ["alone", "beside"])
def test_adapter_without_its_model(folders: Folders, name: str) -> None:
    """A folder of an adapter alone has its model elsewhere, and keeps its pooling and prompts."""
    assert not (folders.root / "alone" / "config.json").exists()
    library = SentenceTransformer(str(folders.root / "alone"), device="cpu")
    for theirs, fields in ((library.encode, {}), (library.encode_query, {"prompt": "query"})):
        expected = torch.from_numpy(theirs(["the red dog"]))
        assert close(embed(folders, name, "the red dog", **fields), expected)
    assert folders.described(name)["checkpoint"]["adapter"] == "alone"


def test_adapter_in_a_plain_folder(folders: Folders) -> None:
    """So is one beside config.json, as transformers does."""
    theirs = transformers.AutoModel.from_pretrained(folders.root / "plain").eval()
    row = {"tensors": {"input_ids": encode(IDS)["tensor"], "attention_mask": encode(IDS * 0 + 1)["tensor"]}}
    reply = folders.asker.extract("plain", [row], [".[last_hidden_state]"])
    with torch.no_grad():
        expected = theirs(IDS[None], torch.ones_like(IDS)[None]).last_hidden_state
    assert close(reply.features[".[last_hidden_state]"], expected, 1e-4)


def test_lengths_of_queries(folders: Folders) -> None:
    """Queries are cut where the folder cuts them, other texts where it cuts those."""
    theirs = SentenceTransformer(str(folders.root / "queries"), device="cpu")
    query, document = theirs.encode_query([LONG]), theirs.encode_document([LONG])
    assert close(embed(folders, "queries", LONG, prompt="query"), torch.from_numpy(query))
    assert close(embed(folders, "queries", LONG, prompt="document"), torch.from_numpy(document))
    assert np.abs(query - theirs.encode([LONG], prompt_name="query")).max() > 1e-3


def test_mask_of_named_inputs(folders: Folders) -> None:
    """The mean of a layer leaves out what the mask does, though the inputs are the operator's."""
    row = {"tensors": {"input_ids": encode(IDS)["tensor"], "attention_mask": encode(MASK)["tensor"]}}
    reply = folders.asker.extract("modern", [row], [{"layer": ".[last_hidden_state]", "pool": "mean"}])
    module = transformers.AutoModel.from_pretrained(folders.root / "modern").eval()
    with torch.no_grad():
        tokens = module(IDS[None], MASK[None]).last_hidden_state[0]
    assert close(reply.features[".[last_hidden_state]"][0], tokens[MASK.bool()].mean(0))


def test_mask_of_samples(folders: Folders) -> None:
    """Frames are of several samples: a mean over those of padding is refused, and what is not pooled is right."""
    sound, kept = torch.randn(400, generator=torch.Generator().manual_seed(0)), torch.ones(400, dtype=torch.int64)
    kept[250:] = 0
    row = {"tensors": {"input_values": encode(sound)["tensor"], "attention_mask": encode(kept)["tensor"]}}
    layer = ".[last_hidden_state]"
    reply = folders.asker.extract("wave", [row], [{"layer": layer, "pool": "mean"}])
    assert (reply.status, "padding" in reply.problem) == (422, True)
    module = transformers.AutoModel.from_pretrained(folders.root / "wave").eval()
    with torch.no_grad():
        expected = module(sound[None], kept[None]).last_hidden_state
    assert close(folders.asker.extract("wave", [row], [layer]).features[layer], expected)


def test_mean_over_time(folders: Folders) -> None:
    """A model of sounds that names no embedding has the mean of its last hidden states, as a guess."""
    described = folders.described("wave")
    assert described["embedding"] == ".[last_hidden_state]"
    assert described["embedding_choice"]["pool"] == "mean"
    row = {
        "tensors": {
            "input_values": encode(torch.ones(400))["tensor"],
            "attention_mask": encode(torch.ones(400, dtype=torch.int64))["tensor"],
        }
    }
    module = transformers.AutoModel.from_pretrained(folders.root / "wave").eval()
    with torch.no_grad():
        expected = module(torch.ones(1, 400)).last_hidden_state.mean(1)
    reply = folders.asker.post("/extract", {"model": "wave", "inputs": [row], "encoding": "base64"})
    assert reply.status == 200
    assert close(reply.features[".[last_hidden_state]"], expected)


def test_left_over_tensors(folders: Folders) -> None:
    """Tensors of the file that the model has not are named in replies."""
    reply = folders.asker.extract("pairs", [{"tokens": [2, 5, 6, 3]}], ["."])
    assert any("cls.predictions" in each for each in reply.body["warnings"])


def test_pairs(folders: Folders) -> None:
    """Ids with the separators of a pair warn of their token types; those of a single text do not."""
    pair = folders.asker.extract("pairs", [{"tokens": [2, 5, 3, 6, 3]}], [".[pooler_output]"])
    assert any("token types" in each for each in pair.body["warnings"])
    single = folders.asker.extract("pairs", [{"tokens": [2, 5, 6, 3]}], [".[pooler_output]"])
    assert not any("token types" in each for each in single.body["warnings"])


def spoil(folder: Path, case: str) -> None:
    """Write a folder that may not be served."""
    if case == "message":
        sentences(folder)
        path = folder / "sentence_bert_config.json"
        entry = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "modality_config": {"message": entry}}))
        return
    text().save_pretrained(folder)
    path, weights = folder / "config.json", folder / "model.safetensors"
    if case == "vocabulary":
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    if case == "bitsandbytes":
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    if case == "scales":
        tensors = load_file(weights)
        name = "encoder.layer.0.output.dense.weight"
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        save_file(tensors, weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("vocabulary", "vocab.txt"),
        ("bitsandbytes", "4-bit"),
        ("scales", "scale_inv"),
        ("message", "tokenizer"),
    ],
)
def test_refused(tmp_path: Path, case: str, named: str) -> None:
    """What would be served wrong is refused, with what is missing by its name."""
    spoil(tmp_path, case)
    with pytest.raises(LoadError) as refused:
        load_model(ModelSpec("m", f"transformers:{tmp_path}", device="cpu"), threads=1)
    assert named in f"{refused.value.detail} {refused.value.hint}"
