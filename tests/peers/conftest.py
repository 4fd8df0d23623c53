"""A server of a small language model and a small network for pictures, and what asks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live, serving
from tests.service.support import Array, Json, arrays_of, configured, tensor
from tests.transformers_nets import VOCABULARY, saved, tokenizer

TOKENS = torch.randint(4, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
PICTURES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Served:
    """A running server and the folder of its language model."""

    live: Live
    gpt2: Path

    def extract(self, model: str, inputs: list[Json], layers: list[Any], **fields: Any) -> dict[str, Array]:
        """What layers return."""
        return self._post("/extract", model, inputs, layers=layers, **fields)

    def explain(self, model: str, inputs: list[Json], **fields: Any) -> dict[str, Array]:
        """Maps."""
        return self._post("/explain", model, inputs, **fields)

    def sweep(self, model: str, inputs: list[Json], **fields: Any) -> dict[str, Array]:
        """The metric of each edit."""
        return self._post("/sweep", model, inputs, **fields)

    def module(self, name: str) -> Any:
        """The model that is served; not to be changed."""
        model = self.live.engine.manager.registry.get_entry(name).model
        assert model is not None
        return model.module

    def _post(self, route: str, model: str, inputs: list[Json], **fields: Any) -> dict[str, Array]:
        body = {"model": model, "inputs": inputs, "encoding": "base64", **fields}
        return arrays_of(self.live.client.post(route, json=body))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Both models, with seeded weights."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    saved("gpt2", folder)
    tokenizer(folder, cls_token=None, sep_token=None, pad_token=None)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    plain.save(str(folder / "tokenizer.json"))
    resnet = ModelSpec(
        "resnet", "torchvision:resnet18", weights="random:5", inputs=(InputSpec("x", (3, 64, 64)),), preprocess="none"
    )
    with serving(configured(ModelSpec("gpt2", f"transformers:{folder}", device="cpu"), resnet)) as live:
        yield Served(live, folder)


def texts() -> list[Json]:
    """``TOKENS`` as inputs."""
    return [{"tokens": row.tolist()} for row in TOKENS]


def pictures() -> list[Json]:
    """``PICTURES`` as inputs."""
    return [tensor(row.numpy()) for row in PICTURES]
