"""What jobs work with: models with seeded weights, here and on a server of this machine, and what they look at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor
from torchvision.models import ResNet18_Weights, resnet18
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from bench.client import start_server
from bench.jobs.nets import SIZE, Recurrent, build_detector
from layertap_client import Client
from tests.oracle import seeded

Array = NDArray[Any]
Arrays = Mapping[str, Array]
STAGES = ["layer1", "layer2", "layer3", "layer4"]
DEPTHS = [f"blocks.{number}" for number in range(12)]
BLOCKS = [f"transformer.h.{number}" for number in range(6)]
VOCABULARY, WIDTH, HEADS, FEATURES = 5000, 768, 12, 2048
NETS = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}


class Lab:
    """The models as torch has them, a client of the server that has them too, and inputs."""

    client: Client
    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generator = torch.Generator().manual_seed(2)
        self._make_inputs()
        self._make_projections()
        self._make_models()

    def _make_inputs(self) -> None:
        self.batch = torch.randn(32, 3, 224, 224, generator=self.generator)
        self.frames = torch.rand(8, 3, 240, 320, generator=self.generator)
        self.texts = [self._draw_tokens(length) for length in range(8, 40)]
        self.prompts = [self._draw_tokens(24) for _ in range(32)]
        self.clean = self._draw_tokens(12)
        self.corrupt = [*self.clean[:3], 7, *self.clean[4:]]
        self.sequences = torch.randn(64, 32, SIZE, generator=self.generator)
        self.labels = [number % 3 for number in range(len(self.texts))]
        (self.folder / "pictures").mkdir()
        self.pictures = [self._draw_picture(number) for number in range(100)]

    def _draw_tokens(self, length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=self.generator).tolist()

    def _draw_picture(self, number: int) -> Path:
        """A file of smooth noise."""
        small = torch.randint(256, (16, 16, 3), generator=self.generator, dtype=torch.uint8)
        path = self.folder / "pictures" / f"{number:05}.png"
        Image.fromarray(small.numpy()).resize((320, 256)).save(path)
        return path

    def _make_projections(self) -> None:
        """An autoencoder, a translator of each block's stream, and a vector to steer by."""
        self.vector = self._draw(WIDTH)
        self.encode = {"weight": self._draw(FEATURES, WIDTH) / WIDTH**0.5, "bias": self._draw(FEATURES)}
        self.decode = {"weight": self._draw(WIDTH, FEATURES) / FEATURES**0.5, "bias": self._draw(WIDTH)}
        self.lenses = [
            {"weight": torch.eye(WIDTH) + self._draw(WIDTH, WIDTH) / WIDTH, "bias": self._draw(WIDTH) / 10}
            for _ in BLOCKS[:-1]
        ]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _make_models(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.resnet = self._add("resnet18", "torchvision:resnet18", resnet18(), 0)
        vit = timm.create_model("vit_tiny_patch16_224")
        self.vit = self._add("vit", "timm:vit_tiny_patch16_224", vit, 2)
        self.read_resnet = ResNet18_Weights.IMAGENET1K_V1.transforms()
        self.read_vit = create_transform(**resolve_model_data_config(vit))
        sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": 6, "n_head": HEADS}
        gpt2 = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
        projections = {"encode": self.encode, "decode": self.decode}
        projections |= {f"lens{number}": lens for number, lens in enumerate(self.lenses)}
        self.gpt2 = self._add_folder("gpt2", GPT2LMHeadModel(gpt2), 3, projections=self._save(projections))
        with torch.no_grad():
            scores = self.gpt2(torch.tensor([self.clean])).logits[0, -1]
        self.answers = int(scores.argmax()), int(scores.argmin())
        self.metric = {"terms": [[1, self.answers[0]], [-1, self.answers[1]]], "position": -1}
        bert = BertConfig(vocab_size=VOCABULARY, **NETS, num_labels=3)
        self.bert = self._add_folder("bert", BertForSequenceClassification(bert), 4)
        self.patches = self._add_folder("patches", ViTForImageClassification(ViTConfig(**NETS, num_labels=10)), 5)
        shape = {"inputs": [{"name": "x", "shape": [32, SIZE]}]}
        self.recurrent = self._add("recurrent", "python:bench.jobs.nets:Recurrent", Recurrent(), 6, **shape)
        shape = {"inputs": [{"name": "images", "shape": [3, 240, 320], "as_list": True}]}
        self.detector = self._add("detector", "python:bench.jobs.nets:build_detector", build_detector(), 7, **shape)
        entries = [{**entry, "load": "lazy"} for entry in self.entries]
        (self.folder / "models.yaml").write_text(yaml.safe_dump({"models": entries}))

    def _add(self, name: str, source: str, module: Any, seed: int, **fields: Any) -> Any:
        """The module with seeded weights, which the server reads from a file."""
        seeded(module, seed).eval().requires_grad_(False)
        save_file(module.state_dict(), self.folder / f"{name}.safetensors")
        self.entries.append({"name": name, "source": source, "weights": f"{name}.safetensors", **fields})
        return module

    def _add_folder(self, name: str, module: Any, seed: int, **fields: Any) -> Any:
        """The same of the transformers library."""
        module.set_attn_implementation("eager")  # the others return no attention
        seeded(module, seed).eval().requires_grad_(False)
        module.save_pretrained(self.folder / name)
        self.entries.append({"name": name, "source": f"transformers:{name}", **fields})
        return module

    def _save(self, projections: Mapping[str, dict[str, Tensor]]) -> dict[str, str]:
        for name, tensors in projections.items():
            save_file(tensors, self.folder / f"{name}.safetensors")
        return {name: f"{name}.safetensors" for name in projections}

    def open_pictures(self, count: int, read: Any) -> Tensor:
        """The first pictures as a model takes them."""
        return torch.stack([read(Image.open(path)) for path in self.pictures[:count]])

    def measure(self, logits: Any) -> Any:
        """The difference of two answers' logits of the last token, as ``metric`` has it."""
        return logits[:, -1, self.answers[0]] - logits[:, -1, self.answers[1]]

    @cached_property
    def lens(self) -> Any:
        """The GPT-2 as TransformerLens has it, nothing folded into its weights."""
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

        sizes = {"n_layers": 6, "d_model": WIDTH, "n_ctx": 128, "n_heads": HEADS, "d_head": WIDTH // HEADS}
        config = HookedTransformerConfig(
            **sizes, d_vocab=VOCABULARY, act_fn="gelu_new", normalization_type="LN", eps=1e-5, device="cpu"
        )
        model = HookedTransformer(config)
        plain = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
        weights = convert_gpt2_weights(self.gpt2, config)
        model.load_and_process_state_dict(weights, **dict.fromkeys(plain, False))
        return model.requires_grad_(False)

    @cached_property
    def traced(self) -> Any:
        """The GPT-2 as nnsight has it."""
        from nnsight import NNsight

        return NNsight(self.gpt2)


@contextmanager
def open_lab() -> Iterator[Lab]:
    """A lab whose server runs until the block ends."""
    warnings.filterwarnings("ignore")  # of the peers
    with TemporaryDirectory() as name:
        lab = Lab(Path(name))
        process, lab.url = start_server("--config", str(lab.folder / "models.yaml"))
        try:
            with Client(lab.url, timeout=600) as lab.client:
                yield lab
        finally:
            process.terminate()
            process.wait()


def compute_difference(found: Arrays, expected: Arrays) -> float:
    """The largest difference, by the largest value of each array."""
    if found.keys() != expected.keys():
        raise ValueError(f"{sorted(found)} beside {sorted(expected)}")
    scaled = [np.abs(found[name] - value).max() / np.abs(value).max() for name, value in expected.items()]
    return float(max(scaled))
