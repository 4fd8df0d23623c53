"""Folders of open_clip: both towers, its transforms and its tokenizers, against the library's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_config_for_hf, save_for_hf
from open_clip.tokenizer import HFTokenizer
from PIL import Image
from safetensors.torch import save_file

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from tests.marks import slow_but
from tests.oracle import seeded
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, image, picture, problem
from tests.transformers_nets import tokenizer

VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
WORDS = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
OWN = WORDS | {"vocab_size": 20, "hf_tokenizer_name": "of/some-hub", "tokenizer_kwargs": {"clean": "canonicalize"}}
SIGLIP = OWN | {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
CONFIGS: dict[str, Json] = {
    "clip": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": VIT, "text_cfg": WORDS},
    "siglip": {
        "embed_dim": 24,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": VIT | {"pool_type": "avg"},
        "text_cfg": SIGLIP,
    },
    "timm": {
        "embed_dim": 64,
        "custom_text": True,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
        "text_cfg": OWN | {"tokenizer_kwargs": {"strip_sep_token": True}},
    },
    "resnet": {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8},
        "text_cfg": OWN | {"pool_type": "eos", "eos_id": 3},
    },
    "coca": {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": VIT | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": OWN | {"embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 16, "vocab_size": 20, "width": 32, "heads": 2, "layers": 1},
    },
}
TRANSFORMS: dict[str, Json] = {
    "clip": {},
    "siglip": {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "squash"},
    "timm": {"interpolation": "bilinear"},
    "resnet": {"resize_mode": "longest"},
    "coca": {},
}
TEXTS = ("a cat sat on the mat", "The DOG, and the cat!", "", "a red dog and a cat saw the cat on the mat and sat")
PICTURES = (picture(1, (80, 64)), picture(2, (33, 70)))


def save(name: str, folder: Path) -> Path:
    """A folder as open_clip writes it, of a model with the weights of a seed."""
    config = json.loads(json.dumps(CONFIGS[name]))
    custom = config.pop("custom_text", False)
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    module = seeded(kind(**config), 0)
    transform = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD} | TRANSFORMS[name]
    open_clip.set_model_preprocess_cfg(module, transform)
    if "hf_tokenizer_name" in CONFIGS[name]["text_cfg"]:
        tokenizer(folder)
        words = HFTokenizer(str(folder), context_length=16)
        save_for_hf(module, words, CONFIGS[name], str(folder), safe_serialization=True)
        return folder
    folder.mkdir(parents=True)
    save_config_for_hf(module, folder / "open_clip_config.json", CONFIGS[name])
    save_file(module.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@dataclass(frozen=True)
class Folders:
    """A server of all folders, and the library's own view of them."""

    live: Live
    folder: Path

    def encode_texts(self, name: str, texts: Any = TEXTS, *, normalize: bool = False) -> Array:
        module, _ = open_clip.create_model_from_pretrained(f"local-dir:{self.folder / name}")
        words = open_clip.get_tokenizer(f"local-dir:{self.folder / name}")
        with torch.no_grad():
            return module.eval().encode_text(words(list(texts)), normalize=normalize).numpy()

    def encode_pictures(self, name: str, *, normalize: bool = False) -> Array:
        module, transform = open_clip.create_model_from_pretrained(f"local-dir:{self.folder / name}")
        rows = torch.stack([transform(Image.open(BytesIO(data))) for data in PICTURES])
        with torch.no_grad():
            return module.eval().encode_image(rows, normalize=normalize).numpy()

    def post(self, name: str, *inputs: Json, **fields: Any) -> Any:
        return self.live.client.post("/extract", json={"model": name, "inputs": list(inputs), **fields})

    def extract(self, name: str, *inputs: Json, **fields: Any) -> Array:
        (found,) = arrays_of(self.post(name, *inputs, **fields)).values()
        return found


@pytest.fixture(scope="module")
def folders(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    folder = tmp_path_factory.mktemp("open_clip")
    for name in CONFIGS:
        save(name, folder / name)
    specs = [ModelSpec(name, f"open_clip:{folder / name}", device="cpu", load="lazy") for name in CONFIGS]
    with serve(configured(*specs), deadline_s=120) as live:
        yield Folders(live, folder)


@pytest.mark.parametrize("name", slow_but(("clip", "siglip"), CONFIGS))
def test_towers(folders: Folders, name: str) -> None:
    """Texts and pictures, each alone and beside each other, normalised or not, are the library's, in one space."""
    texts, pictures = [{"text": text} for text in TEXTS], [image(data) for data in PICTURES]
    expected = np.concatenate([folders.encode_pictures(name), folders.encode_texts(name)])
    np.testing.assert_allclose(folders.extract(name, *texts), expected[2:], atol=1e-5)
    np.testing.assert_allclose(folders.extract(name, *pictures), expected[:2], atol=1e-5)
    np.testing.assert_allclose(folders.extract(name, *pictures, *texts), expected, atol=1e-5)
    normed = folders.encode_texts(name, normalize=True)
    np.testing.assert_allclose(folders.extract(name, *texts, normalize=True), normed, atol=1e-5)
    reply = folders.live.client.post("/v1/embeddings", json={"model": name, "input": list(TEXTS)}).json()
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], normed, atol=1e-5)
    spaces = {folders.post(name, *inputs).json()["space"] for inputs in (texts, pictures, [*pictures, *texts])}
    assert len(spaces) == 1


def test_layers(folders: Folders) -> None:
    """A layer of each tower is what a hook of the caller's sees."""
    module, transform = open_clip.create_model_from_pretrained(f"local-dir:{folders.folder / 'clip'}")
    words = open_clip.get_tokenizer(f"local-dir:{folders.folder / 'clip'}")
    seen: list[Array] = []
    for layer, inputs, run in (
        (
            "visual.transformer.resblocks.0",
            image(PICTURES[0]),
            lambda: module.encode_image(transform(Image.open(BytesIO(PICTURES[0])))[None]),
        ),
        ("transformer.resblocks.1.mlp", {"text": TEXTS[0]}, lambda: module.encode_text(words([TEXTS[0]]))),
    ):
        with (
            torch.no_grad(),
            module.get_submodule(layer).register_forward_hook(lambda *call: seen.append(call[-1].numpy())),
        ):
            run()
        np.testing.assert_allclose(folders.extract("clip", inputs, layers=[layer]), seen[-1], atol=1e-5)


def test_long_texts(folders: Folders) -> None:
    """A text that is too long is cut as the library cuts it, with a warning; or refused, as asked."""
    text = "a cat sat on the mat and " * 5
    for name in ("clip", "siglip"):
        reply = folders.post(name, {"text": text})
        (found,) = arrays_of(reply).values()
        np.testing.assert_allclose(found, folders.encode_texts(name, [text]), atol=1e-5)
        assert "1 of 1 texts truncated" in reply.headers["x-layertap-warnings"]
        refused = problem(folders.post(name, {"text": text}, truncate="none"), 422)
        assert "the limit is 16" in refused["detail"]
        refused = problem(folders.post(name, {"text": text}, truncate="start"), 422)
        assert "at their end only" in refused["detail"]
    assert "x-layertap-warnings" not in folders.post("clip", {"text": "a cat"}).headers


def test_tokens(folders: Folders) -> None:
    """Ids of the model's own tokenizer give what its texts give; fewer what the library gives, if it takes them."""
    ids = open_clip.get_tokenizer(f"local-dir:{folders.folder / 'siglip'}")([TEXTS[0]])[0].tolist()
    np.testing.assert_array_equal(
        folders.extract("siglip", {"tokens": ids}), folders.extract("siglip", {"text": TEXTS[0]})
    )
    module, _ = open_clip.create_model_from_pretrained(f"local-dir:{folders.folder / 'siglip'}")
    with torch.no_grad():
        expected = module.eval().encode_text(torch.tensor([ids[:5]])).numpy()
    np.testing.assert_allclose(folders.extract("siglip", {"tokens": ids[:5]}), expected, atol=1e-5)
    refused = problem(folders.post("clip", {"tokens": ids[:5]}), 422)
    assert "text [5]" in refused["detail"]


def test_weights(tmp_path: Path) -> None:
    """Pickled weights are those of safetensors, read without running code; a seed and a file are taken as elsewhere."""
    folder = save("siglip", tmp_path / "folder")
    file = folder / "open_clip_model.safetensors"
    spec = ModelSpec("net", f"open_clip:{folder}", device="cpu")
    saved = build_model(spec).module.state_dict()
    torch.save(saved, folder / "open_clip_pytorch_model.bin")
    named = build_model(replace(spec, weights=str(file))).module.state_dict()
    file.unlink()
    for state in (build_model(spec).module.state_dict(), named):
        assert all(torch.equal(state[name], value) for name, value in saved.items())
    drawn = build_model(replace(spec, weights="random:1")).module.state_dict()
    assert not torch.equal(drawn["visual.conv1.weight"], saved["visual.conv1.weight"])


def test_configured(command: Command, tmp_path: Path) -> None:
    """A configuration names the folder beside it; one without the library's file is told before anything is loaded."""
    save("siglip", tmp_path / "siglip")
    config = tmp_path / "models.yaml"
    config.write_text("models: [{name: net, source: 'open_clip:siglip', device: cpu}]")
    assert command("check", "--config", config).status == 0
    (tmp_path / "siglip" / "open_clip_config.json").unlink()
    done = command("check", "--config", config)
    assert (done.status, "there is no directory with open_clip_config.json" in done.notes) == (2, True), done.notes


def change_config(folder: Path, change: Callable[[Json], None]) -> None:
    file = folder / "open_clip_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda folder: (folder / "open_clip_config.json").unlink(), "no open_clip_config.json"),
    "no weights": (lambda folder: (folder / "open_clip_model.safetensors").unlink(), "holds no open_clip_model"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer of"),
    "a text tower of the hub": (
        lambda folder: change_config(
            folder, lambda each: each["model_cfg"]["text_cfg"].update(hf_model_name="roberta-base")
        ),
        "is 'roberta-base'",
    ),
    "a picture tower of the hub": (
        lambda folder: change_config(
            folder, lambda each: each["model_cfg"]["vision_cfg"].update(timm_model_name="hf-hub:a/b")
        ),
        "no architecture 'hf-hub:a/b'",
    ),
    "code for its tokenizer": (
        lambda folder: change_config(
            folder, lambda each: each["model_cfg"]["text_cfg"]["tokenizer_kwargs"].update(trust_remote_code=True)
        ),
        "tokenizer_kwargs/trust_remote_code",
    ),
    "another width": (
        lambda folder: change_config(folder, lambda each: each["model_cfg"].update(embed_dim=32)),
        "another shape",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    """What the folder does not hold, and what would be downloaded or run, is refused by name."""
    folder = save("resnet", tmp_path / "folder")
    spoil, says = REFUSED[case]
    spoil(folder)
    with pytest.raises(LoadError) as caught:
        build_model(ModelSpec("net", f"open_clip:{folder}", device="cpu"))
    assert says in caught.value.detail
    assert str(tmp_path) not in caught.value.detail + caught.value.hint
