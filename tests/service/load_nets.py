"""The models of the load: what a server is told of them, their twins offline, and every tensor that hooks see there."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
BY_RANK = {1: "N", 2: "NC", 3: "NTC", 4: "NCHW"}
MIXED, MIXED_OR_ALONE, CONSTANT = "all rows", "one row", "no rows"  # what axes say of tensors without rows


@dataclass(frozen=True)
class Served:
    """A model of the load.

    ``axes`` are those of tensors, by canonical name without the call, that ``BY_RANK`` does not tell; one without
    axes of its own holds something of all rows of its request (``MIXED``), can be had for one row only
    (``MIXED_OR_ALONE``), or is the same for all (``CONSTANT``). ``alone``: rows affect each other, so each must be
    what it is alone, unless the request is isolated. ``avoid`` are layers that no engine can tell to be other than
    they seem. ``shapes`` are others than the configured one; ``scale`` is that of the inputs' values; ``often`` how
    many in all requests.
    """

    name: str
    factory: str
    inputs: tuple[InputSpec, ...]
    axes: Mapping[str, str] | None = None
    alone: bool = False
    avoid: frozenset[str] = frozenset()
    shapes: tuple[tuple[int, ...], ...] = ()
    scale: float = 1.0
    often: int = 1
    weights: Path | None = None

    def spec(self, folder: Path) -> ModelSpec:
        """What the server is told; weights of a seed are written to a folder first."""
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        weights = self.weights or folder / f"{self.name}.safetensors"
        if self.weights is None and state:
            save_file(state, weights)
        return ModelSpec(
            self.name,
            f"python:{self.factory}",
            str(weights) if state else "DEFAULT",
            device="cpu",
            preprocess="none",
            inputs=self.inputs,
        )

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
    def keys(self) -> tuple[Key, ...]:
        """Every tensor that may be asked for."""
        return tuple(key for key in self._one_row if key[0] not in self.avoid)

    @cached_property
    def numbers(self) -> Mapping[Key, int]:
        """How many numbers each holds for one row."""
        return {key: array.size for key, array in self._one_row.items()}

    def axes_of(self, key: Key) -> str:
        """The letters of a tensor's axes, or what stands for them where rows have none."""
        name, _, path, site = key
        text = name + "".join(f"[{step}]" for step in path) + ("" if site == "output" else f":{site}")
        return (self.axes or {}).get(text) or BY_RANK[self._one_row[key].ndim]

    def name_of(self, key: Key) -> str:
        """What a tensor is called in a request and in its reply."""
        name, call, path, site = key
        number = f"#{call}" if any(other[0] == name and other[1] for other in self._one_row) else ""
        return name + number + "".join(f"[{step}]" for step in path) + ("" if site == "output" else f":{site}")

    def seen(self, rows: Mapping[str, Array], isolated: bool) -> dict[Key, Array]:
        """Every tensor of the forward of a request's rows, and of no others."""
        count = len(next(iter(rows.values())))
        if not self.alone or isolated or count == 1:
            return self._recorded(rows)
        parts = [self._recorded({name: value[at : at + 1] for name, value in rows.items()}) for at in range(count)]
        together = [key for key in self._one_row if self.axes_of(key) not in (MIXED, MIXED_OR_ALONE, CONSTANT)]
        return {key: np.concatenate([part[key] for part in parts], self.axes_of(key).index("N")) for key in together}

    @cached_property
    def _one_row(self) -> dict[Key, Array]:
        zeros = {spec.name: np.zeros((1, *spec.shape), spec.dtype) for spec in self.inputs}
        return self._recorded(zeros)

    def _recorded(self, rows: Mapping[str, Array]) -> dict[Key, Array]:
        tensors = {name: torch.from_numpy(value) for name, value in rows.items()}
        seen = record(self.module, *tensors.values()) if len(tensors) == 1 else record(self.module, **tensors)
        return {key: value.numpy() for key, value in seen.items()}


def _net(name: str, factory: str, often: int = 1, **fields: object) -> Served:
    served = Served(name, f"tests.nets:{factory}", INPUTS[factory], often=often)
    return replace(served, **fields)  # type: ignore[arg-type]


def _all(axes: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, axes)


_ATTENTION = ("attention[0]:input", "attention[1]:input", "attention[2]:input", "attention[0]", "norm:input", "norm")

SERVED = (
    Served(
        "digits",
        "layertap.models.digits:digits",
        digits.INPUTS,
        shapes=((3, 24, 40),),
        often=4,
        weights=digits.WEIGHTS,
    ),
    _net("vit", "vit", 2),
    _net("encoder", "Encoder", 2),
    _net("structured", "Structured", 2, scale=0.3),  # far from the poles of the tangent
    _net("resnet", "resnet"),
    _net("chain", "Chain", 2, shapes=((3, 10, 6),)),
    _net("centred", "BatchCentred", 2, axes={"mean": MIXED_OR_ALONE}, alone=True),
    _net("backwards", "Backwards", axes=_all(MIXED_OR_ALONE, ("lstm[1][0]", "lstm[1][1]")), alone=True),
    _net("time", "TimeOut", 2, axes={**_all("TNC", (".", *_ATTENTION)), "attention[1]": "NTT"}),
    _net("windows", "Windows", 2),
    _net("keywords", "Keywords"),
    _net("tied", "Tied"),
    _net("inner", "Inner", 2, axes={"similar": MIXED_OR_ALONE, "first": MIXED, "mean": MIXED, "table": CONSTANT}),
    _net("views", "Views"),
    # Who asks it for "." gets another half of it where a large row is in the same forward, and nothing shows it.
    _net("early", "EarlyExit", avoid=frozenset({"."})),
    Served("touchy", "tests.service.nets_http:Touchy", (ROW,)),
)
BY_NAME = {served.name: served for served in SERVED}
