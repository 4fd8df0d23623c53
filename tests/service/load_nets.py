"""The models of the load: what a server is told of them, their twins offline, and every tensor that hooks see there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from layertap.models import digits
from layertap.models.spec import InputSpec, ModelSpec
from tests.fidelity.served_model import randomise
from tests.nets import INPUTS
from tests.oracle import Key, record
from tests.service.support import ROW, Array

SEED = 11


@dataclass(frozen=True)
class Served:
    """A model of the load.

    ``crosses_rows``: rows affect each other, so each must be what it is alone, unless the request is isolated.
    ``unsplittable`` are tensors, by canonical name without the call, that have no row of a request's own; ``avoid``
    are layers that no engine can tell to be other than they seem. ``shapes`` are others than the configured one;
    ``scale`` is that of the inputs' values; ``often`` how many in all requests.
    """

    name: str
    factory: str
    inputs: tuple[InputSpec, ...]
    crosses_rows: bool = False
    unsplittable: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    shapes: tuple[tuple[int, ...], ...] = ()
    scale: float = 1.0
    often: int = 1
    weights: Path | None = None

    def spec(self, folder: Path) -> ModelSpec:
        """What the server is told; weights of a seed are written to a folder first."""
        weights = self.weights or folder / f"{self.name}.safetensors"
        if self.weights is None:
            save_file({name: value.clone() for name, value in self.module.state_dict().items()}, weights)
        fields = {"device": "cpu", "preprocess": "none", "inputs": self.inputs}
        return ModelSpec(self.name, f"python:{self.factory}", str(weights), **fields)  # type: ignore[arg-type]

    @cached_property
    def module(self) -> nn.Module:
        """The twin, which nothing of the service has touched."""
        path, _, factory = self.factory.partition(":")
        module: nn.Module = getattr(importlib.import_module(path), factory)().eval()
        if self.weights is None:
            return randomise(module, SEED)
        module.load_state_dict(load_file(self.weights))
        return module

    @cached_property
    def numbers(self) -> Mapping[Key, int]:
        """How many numbers each tensor that may be asked for holds for one row."""
        return {key: array.size for key, array in self._one_row.items() if key[0] not in self.avoid}

    def name_of(self, key: Key) -> str:
        """What a tensor is called in a request and in its reply."""
        name, call, path, site = key
        number = f"#{call}" if any(other[0] == name and other[1] for other in self._one_row) else ""
        return name + number + "".join(f"[{step}]" for step in path) + ("" if site == "output" else f":{site}")

    def seen(self, rows: Mapping[str, Array], isolated: bool) -> dict[Key, Array]:
        """Every tensor of the forward of a request's rows, and of no others."""
        count = len(next(iter(rows.values())))
        if not self.crosses_rows or isolated or count == 1:
            return self._recorded(rows)
        parts = [self._recorded({name: value[at : at + 1] for name, value in rows.items()}) for at in range(count)]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    @cached_property
    def _one_row(self) -> dict[Key, Array]:
        zeros = {spec.name: np.zeros((1, *spec.shape), spec.dtype) for spec in self.inputs}
        return self._recorded(zeros)

    def _recorded(self, rows: Mapping[str, Array]) -> dict[Key, Array]:
        tensors = {name: torch.from_numpy(value) for name, value in rows.items()}
        seen = record(self.module, *tensors.values()) if len(tensors) == 1 else record(self.module, **tensors)
        return {key: value.numpy() for key, value in seen.items()}


def _net(name: str, factory: str, **fields: object) -> Served:
    return Served(name, f"tests.nets:{factory}", INPUTS[factory], **fields)  # type: ignore[arg-type]


SERVED = (
    Served(
        "digits", "layertap.models.digits:digits", digits.INPUTS, shapes=((3, 24, 40),), often=4, weights=digits.WEIGHTS
    ),
    _net("vit", "vit", often=2),
    _net("encoder", "Encoder", often=2),
    _net("structured", "Structured", often=2, scale=0.3),  # far from the poles of the tangent
    _net("chain", "Chain", often=2, shapes=((3, 10, 6),)),
    _net("centred", "BatchCentred", often=2, unsplittable=frozenset({"mean"}), crosses_rows=True),
    _net("time", "TimeOut", often=2),  # rows on axis 1
    _net("windows", "Windows"),
    _net("keywords", "Keywords"),
    _net("inner", "Inner", often=2, unsplittable=frozenset({"similar", "first", "mean", "table"})),
    # Who asks it for "." gets another half of it where a large row is in the same forward, and nothing shows it.
    _net("early", "EarlyExit", avoid=frozenset({"."})),
    Served("touchy", "tests.service.nets_http:Touchy", (ROW,)),
)
BY_NAME = {served.name: served for served in SERVED}
