"""Requests to models of one's own, and replies as tensors; what is right comes from plain PyTorch."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import serving

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A status, the whole JSON body, and its features by key."""

    status: int
    body: Json
    features: Mapping[str, Tensor]

    @property
    def problem(self) -> str:
        """What an error says: its detail, its hint and those of its faults."""
        faults = [f"{each.get('detail')} {each.get('hint')}" for each in self.body.get("errors", [])]
        return " ".join([str(self.body.get("detail")), str(self.body.get("hint")), *faults])


@dataclass(frozen=True)
class Asker:
    """Asks one server."""

    client: httpx.Client

    def extract(self, model: str, rows: Sequence[Tensor | Json], layers: Sequence[str | Json], **more: Any) -> Reply:
        """``POST /extract`` of rows without a batch axis, or of inputs as they are sent."""
        body = {"model": model, "inputs": [encode(row) for row in rows], "layers": list(layers), "encoding": "base64"}
        return self.post("/extract", {**body, **more})

    def post(self, path: str, body: Json) -> Reply:
        """Any request whose reply has features."""
        reply = self.client.post(path, json=body)
        found = reply.json()
        return Reply(reply.status_code, found, {key: decode(each) for key, each in found.get("features", {}).items()})


def encode(row: Tensor | Json) -> Json:
    """An input as JSON holds it."""
    if not isinstance(row, Tensor):
        return row
    data = b64encode(row.contiguous().numpy().tobytes()).decode()
    return {"tensor": {"dtype": str(row.dtype).removeprefix("torch."), "shape": list(row.shape), "data": data}}


def decode(feature: Json) -> Tensor:
    """A feature of a reply whose encoding is base64."""
    array = np.frombuffer(b64decode(feature["data"]), feature["dtype"]).reshape(feature["shape"])
    return torch.from_numpy(array.copy())


def own(module: str, factory: str, *inputs: InputSpec, name: str = "", **fields: Any) -> ModelSpec:
    """The entry of a factory of ``tests.own_models.MODULE``; it takes rows of eight numbers unless others are given."""
    source = f"python:tests.own_models.{module}:{factory}"
    return ModelSpec(name or factory, source, device="cpu", inputs=inputs or (InputSpec("x", (8,)),), **fields)


@contextmanager
def serving_models(*specs: ModelSpec, **settings: Any) -> Iterator[Asker]:
    """A server of these models until the block ends; without workers unless ``workers`` says otherwise."""
    with serving(Configuration(specs, specs[0].name), **{"check_shared": 200, **settings}) as live:
        yield Asker(live.client)


def hook(module: nn.Module, name: str, *rows: Tensor) -> list[Tensor]:
    """What each call of a part returned in one forward of a batch of one, by a plain hook and an immediate copy."""
    found: list[Tensor] = []
    part = dict(module.named_modules())[name]
    with part.register_forward_hook(lambda part, args, output: found.append(output.clone())), torch.no_grad():
        module(*(row[None] for row in rows))
    return found
