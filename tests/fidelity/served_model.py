"""A model with random weights, run offline under hooks and then served from a file of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.fidelity.client import LIMITS, all_tensors, dry_run_shapes
from tests.fidelity.compare import Tally, named
from tests.oracle import record, seeded
from tests.server import Live, serving
from tests.service.support import Array

ROWS = 2


@dataclass(frozen=True)
class Case:
    """A model, how it is built without the service, and the shape of the rows that it gets.

    ``configured``: whether the server knows of that shape, or has to find out when the rows arrive.
    """

    source: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    configured: bool = True

    @property
    def name(self) -> str:
        """The name of its architecture."""
        return self.source.rpartition(":")[2]

    def spec(self, weights: Path) -> ModelSpec:
        """The configuration of the served twin."""
        inputs = (InputSpec("x", self.shape),) if self.configured else None
        return ModelSpec(self.name, self.source, str(weights), device="cpu", load="lazy", inputs=inputs)


@dataclass(frozen=True)
class ServedModel:
    """A served model, a batch for it, and every tensor that hooks saw when its twin ran that batch offline."""

    live: Live
    name: str
    batch: Array
    wanted: dict[str, Array]

    def check(self, form: str = "npy", reply: str = "safetensors") -> Tally:
        """All tensors, no others, of the same shapes, dtypes and values; afterwards no hook is left."""
        shapes = {key: (array.shape, array.dtype.name) for key, array in self.wanted.items()}
        assert dry_run_shapes(self.live, self.name, self.batch, form) == shapes
        tally = Tally()
        for found in all_tensors(self.live, self.name, self.batch, self.wanted, form, reply):
            tally.add(found, self.wanted)
        assert tally.tensors == len(self.wanted)
        assert self.live.client.get(f"/models/{self.name}").json()["hooks"] == 0
        return tally


@contextmanager
def served_model(case: Case, folder: Path, seed: int = 0) -> Iterator[ServedModel]:
    """Run a model offline, let it go, and serve its twin while the block lasts."""
    weights = folder / "weights.safetensors"
    batch = np.random.default_rng(seed).standard_normal((ROWS, *case.shape), dtype=np.float32)
    wanted = _offline(case, weights, batch, seed)
    _check_power(wanted)
    try:
        with serving(Configuration((case.spec(weights),), case.name), **LIMITS) as live:
            yield ServedModel(live, case.name, batch, wanted)
    finally:
        weights.unlink()


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """The module with random weights; buffers that no file holds stay as they were built."""
    held = module.state_dict()
    others = {name: value.clone() for name, value in module.named_buffers() if name not in held}
    seeded(module, seed)
    for name, value in others.items():
        module.get_buffer(name).copy_(value)
    return module


def save(module: nn.Module, weights: Path) -> None:
    """Write a module's weights to a file."""
    save_file({name: value.contiguous() for name, value in module.state_dict().items()}, weights)


def _offline(case: Case, weights: Path, batch: Array, seed: int) -> dict[str, Array]:
    module = randomise(case.build().eval(), seed)
    save(module, weights)
    return named(record(module, torch.from_numpy(batch.copy())))


def _check_power(wanted: dict[str, Array]) -> None:
    """Tensors that could be taken for one another, or that say nothing, would prove nothing."""
    for key, array in wanted.items():
        assert np.isfinite(array).all(), key
        assert array.size == 1 or np.ptp(array) > 0, f"{key} is the same everywhere"
    for key in [key for key in wanted if key.partition("[")[0] == "."]:
        assert not np.array_equal(*wanted[key]), "the rows are not told apart"
