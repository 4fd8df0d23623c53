"""Models of two towers: pictures and texts by one name, each as the library's own functions compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from torch import Tensor, nn

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service import support
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, image, picture, problem, text64
from tests.transformers_nets import POSITIONS, net, tokenizer

SENTENCES = ("a cat sat on the mat", "a dog", "the red dog and the cat saw the mat")
SHARED = ".[pooler_output]"
PICTURE = picture(1, (80, 64))


@dataclass(frozen=True)
class Towers:
    """A folder as people have it, and what the library makes of it."""

    folder: Path
    module: Any

    def make_pixels(self, data: bytes) -> Tensor:
        """A picture by the library's own processor."""
        processor = transformers.AutoImageProcessor.from_pretrained(self.folder)
        return processor(Image.open(BytesIO(data)), return_tensors="pt")["pixel_values"]

    def of_picture(self, data: bytes) -> Array:
        """The library's embedding of a picture."""
        return _to_array(self.module.get_image_features(pixel_values=self.make_pixels(data)))

    def tokens(self, sentence: str) -> dict[str, Tensor]:
        """A text by the library's own tokenizer."""
        rows = transformers.AutoTokenizer.from_pretrained(self.folder)(sentence, return_tensors="pt")
        return {name: rows[name] for name in ("input_ids", "attention_mask")}

    def of_text(self, sentence: str) -> Array:
        """The library's embedding of a text alone."""
        return _to_array(self.module.get_text_features(**self.tokens(sentence)))


def _to_array(output: Any) -> Array:
    return output.pooler_output.numpy()


def save_towers(name: str, folder: Path) -> Towers:
    module = net(name)
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx] = 0  # as training leaves it, and the library has it again
    module.save_pretrained(folder)
    tokenizer(folder)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    processor.save_pretrained(folder)
    return Towers(folder, module)


def towers_spec(towers: Towers) -> ModelSpec:
    return ModelSpec("clip", f"transformers:{towers.folder}", device="cpu")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Towers:
    return save_towers("clip", tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def live(serve: Serve, clip: Towers) -> Iterator[Live]:
    with serve(configured(towers_spec(clip))) as live:
        yield live


def extract(live: Live, *inputs: Json, **fields: Any) -> dict[str, Array]:
    body = {"model": "clip", "encoding": "base64", "inputs": list(inputs), **fields}
    return arrays_of(live.client.post("/extract", json=body, headers={"accept": "application/x-npz"}))


def embed(live: Live, values: list[str], **fields: Any) -> Array:
    response = live.client.post("/v1/embeddings", json={"model": "clip", "input": values, **fields})
    assert response.status_code == 200, response.text
    return np.array([each["embedding"] for each in response.json()["data"]], np.float32)


def unit(rows: Array) -> Array:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def close(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def make_transparent(data: bytes) -> bytes:
    """A picture as a PNG that lets more through from line to line."""
    drawn, stream = Image.open(BytesIO(data)), BytesIO()
    drawn.putalpha(Image.linear_gradient("L").resize(drawn.size))
    drawn.save(stream, "PNG")
    return stream.getvalue()


def test_pictures_and_texts(live: Live, clip: Towers) -> None:
    """Alone, several, and beside each other: what the library's functions give, in one space.

    A transparent picture is laid onto white, as its processor does.
    """
    pictures = [PICTURE, make_transparent(picture(2, (64, 96)))]
    of_pictures = np.concatenate([clip.of_picture(data) for data in pictures])
    of_texts = np.concatenate([clip.of_text(sentence) for sentence in SENTENCES])
    close(extract(live, *map(image, pictures), layers=[SHARED])[SHARED], of_pictures)
    texts = [{"text": sentence} for sentence in SENTENCES]
    close(extract(live, texts[0], layers=[SHARED])[SHARED], of_texts[:1])
    mixed = [texts[0], image(pictures[0]), texts[1], image(pictures[1]), texts[2]]
    both = np.stack([of_texts[0], of_pictures[0], of_texts[1], of_pictures[1], of_texts[2]])
    close(extract(live, *mixed, layers=[SHARED])[SHARED], both)
    close(extract(live, *mixed)[SHARED], both)


@pytest.mark.slow
def test_texts_that_are_filled_up(serve: Serve, tmp_path: Path) -> None:
    """Texts of a model that is given no mask are as long as its table of positions: as SigLIP takes them."""
    towers = save_towers("siglip2", tmp_path)
    tokenizer(tmp_path, model_max_length=POSITIONS, model_input_names=["input_ids"])
    fill = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sentences = [*SENTENCES, "a cat " * POSITIONS]
    rows = fill(sentences, padding="max_length", truncation=True, return_tensors="pt")
    with serve(configured(towers_spec(towers))) as live:
        found = extract(live, *({"text": sentence} for sentence in sentences), truncate="end")[SHARED]
        body = {"model": "clip", "inputs": [image(PICTURE)]}
        assert "spatial_shapes" in problem(live.client.post("/extract", json=body), 422)["detail"]
    close(found, _to_array(towers.module.get_text_features(**rows)))


def test_embeddings(live: Live, clip: Towers) -> None:
    """The other protocol: strings are texts, data URLs and ``modality: image`` are pictures."""
    of_texts = unit(np.concatenate([clip.of_text(sentence) for sentence in SENTENCES]))
    of_picture, sent = unit(clip.of_picture(PICTURE)), text64(PICTURE)
    close(embed(live, list(SENTENCES)), of_texts)
    close(embed(live, [f"data:image/png;base64,{sent}"]), of_picture)
    close(embed(live, [sent], modality="image"), of_picture)
    close(embed(live, [SENTENCES[0], f"data:image/png;base64,{sent}"]), np.concatenate([of_texts[:1], of_picture]))
    close(embed(live, [f"data: {SENTENCES[0]}"]), unit(clip.of_text(f"data: {SENTENCES[0]}")))


def test_layers_of_either(live: Live, clip: Towers) -> None:
    """A layer of a tower gives what a plain hook on it does; the other's inputs are refused by name."""
    for tower, sent, rows, call in (
        ("vision", image(PICTURE), {"pixel_values": clip.make_pixels(PICTURE)}, clip.module.get_image_features),
        ("text", {"text": SENTENCES[0]}, clip.tokens(SENTENCES[0]), clip.module.get_text_features),
    ):
        name = f"{tower}_model.encoder.layers.1.mlp"
        kept: list[Tensor] = []
        with clip.module.get_submodule(name).register_forward_hook(lambda *args, kept=kept: kept.append(args[2])):
            call(**rows)
        close(extract(live, sent, layers=[name])[name], kept[0].numpy())
        other = {"text": "image", "vision": "text"}[tower]
        inputs = [{"text": "a cat"}] if other == "text" else [image(PICTURE)]
        body = {"model": "clip", "layers": [name], "inputs": inputs}
        found = problem(live.client.post("/extract", json=body), 422)
        assert f"layer '{name}' does not run for {other if other == 'text' else 'picture'}s" in found["detail"]


def test_tensors(live: Live, clip: Towers) -> None:
    """Tensors by name: of one tower, or of both, which are one forward of the whole."""
    pixels, tokens = clip.make_pixels(PICTURE), clip.tokens(SENTENCES[0])
    arrays = {name: value.numpy() for name, value in {**tokens, "pixel_values": pixels}.items()}

    def send(layers: str, *names: str) -> dict[str, Array]:
        content = support.safetensors_of(**{name: arrays[name] for name in names})
        request = support.raw(content, "application/x-safetensors", model="clip", layers=layers, format="npz")
        return arrays_of(live.client.post("/extract", **request))

    close(send(SHARED, "pixel_values")[SHARED], clip.of_picture(PICTURE))
    close(send(SHARED, "input_ids")[SHARED], clip.of_text(SENTENCES[0]))
    whole = clip.module(**tokens, pixel_values=pixels)
    found = send(".", *arrays)
    for name in ("logits_per_image", "image_embeds", "text_embeds"):
        close(found[f".[{name}]"], whole[name].numpy())
