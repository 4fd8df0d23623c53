"""A forward by a warm plan's graphs, without a server: the files that ours has on disk, or compiles first."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from bench.serving.server import SEED
from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.loading import load_model
from layertap.models.spec import ModelSpec, Pool, WarmSpec
from layertap.service.settings import Settings


class GraphForward:
    """A model's layers, pooled; so many threads may run it at once as there are cores."""

    def __init__(self, model: str, layers: Sequence[str], pool: Pool) -> None:
        warm = WarmSpec(tuple(layers), pool=pool, compile="always")
        spec = ModelSpec(model, f"torchvision:{model}", f"random:{SEED}", "cpu", warm=(warm,))
        loaded = load_model(spec, replicas=os.cpu_count() or 1)
        (graphs,) = prepare_warm_plans(loaded, Settings().cache_dir / "plans", compiles=True).graphs
        if graphs is None:
            raise SystemExit(f"{model} has no graph: the log says why")
        self._graphs = graphs

    def __call__(self, batch: Tensor) -> dict[str, Tensor]:
        """The layers of a batch, by name."""
        graph = self._graphs.single_row if len(batch) == 1 else self._graphs.batch
        names = [capture.point.layer for capture in self._graphs.captures]
        return dict(zip(names, graph.run([batch]), strict=True))
