"""What tests of models that are exchanged share: versions of a model, files that configure them, what each gives.

Its fixtures are those of all tests beside it, by ``conftest``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layertap.service.config.configuration import Configuration, read_configuration
from tests.server import Live
from tests.service import nets_http
from tests.service.gated_server import post_rows
from tests.service.nets_http import Gated
from tests.service.support import Array, Json

FACTORY = "python:tests.service.nets_http:Gated"
WAITING = "python:tests.service.nets_http:waiting"  # the same once the fixture ``gate`` is open
GATED_BYTES = 4 * (3 * 4 + 3)  # weights and biases of a linear layer from four numbers to three
LETTERS = "abc"


@dataclass(frozen=True)
class Versions:
    """A folder with weights ``a``, ``b`` and ``c`` of one model, and the configuration file that has the first."""

    folder: Path

    @property
    def file(self) -> Path:
        """The configuration file."""
        return self.folder / "models.json"

    def write(self, *models: Json, **rest: object) -> Configuration:
        """Write the file, and read it as the server does."""
        self.file.write_text(json.dumps({"models": models, **rest}))
        return read_configuration(self.file)

    def answer(self, letter: str, rows: Array) -> Array:
        """What a version's linear layer gives, by numpy."""
        state = make_state(letter)
        weight, bias = (state[f"linear.{name}"].numpy().astype(np.float64) for name in ("weight", "bias"))
        return rows.astype(np.float64) @ weight.T + bias


def make_state(letter: str) -> dict[str, torch.Tensor]:
    """The weights of a version: no two give answers that are alike."""
    generator = torch.Generator().manual_seed(ord(letter))
    return {
        "linear.weight": torch.randn(3, 4, generator=generator),
        "linear.bias": torch.full((3,), 10.0 * LETTERS.index(letter)),
    }


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """The weights of all versions in a folder below one of the test's own."""
    (tmp_path / "weights").mkdir()
    for letter in LETTERS:
        save_file(make_state(letter), tmp_path / "weights" / f"{letter}.safetensors")
    return Versions(tmp_path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets what the factory ``nets_http:waiting`` makes go on loading: it waits behind its construction."""
    opened = threading.Event()

    class Waiting(Gated):
        def train(self, mode: bool = True) -> Self:
            assert opened.wait(60)
            return super().train(mode)

    monkeypatch.setattr(nets_http, "waiting", Waiting, raising=False)
    yield opened
    opened.set()


def entry(letter: str = "a", name: str = "gated", **fields: object) -> Json:
    """A model's entry with the weights of a version."""
    chosen = {"source": FACTORY, "weights": f"weights/{letter}.safetensors", "device": "cpu", **fields}
    return {"name": name, "inputs": [{"name": "x", "shape": [4]}], **chosen}


ALLOW: Json = {"weights": ["weights/"]}


def put(
    live: Live, letter: str, name: str = "gated", *, headers: Mapping[str, str] | None = None, **fields: object
) -> httpx.Response:
    """Ask for another version of a model."""
    return live.client.put(f"/models/{name}", json=entry(letter, name, **fields), headers=headers)


def fingerprint(live: Live, name: str = "gated") -> str:
    """That of the version which answers."""
    reply = post_rows(live, model=name)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-layertap-fingerprint"]


def states(live: Live) -> dict[str, str]:
    """How each model is."""
    return {each["name"]: each["state"] for each in live.client.get("/models").json()["models"]}
