"""What batches of a warm plan take with hooks and by its graphs, kept in a file beside these."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

import torch

from layertap.models.devices.costs import ONLY_FIGURES, Figure, ForwardSeconds, read_figures, write_figures
from layertap.models.devices.devices import describe_speed

log = logging.getLogger("layertap")
RECIPE = 2  # to be raised where seconds are measured otherwise
BATCH_ROWS = 8  # rows of the larger batch


@dataclass(frozen=True)
class PairedSeconds:
    """Seconds of a batch with hooks and by a graph, one right after the other: medians of many pairs.

    ``speedup`` is the median of the pairs' ratios: how many times as long hooks take.
    """

    __pydantic_config__ = ONLY_FIGURES

    hooks: Figure
    graph: Figure
    speedup: Figure


@dataclass(frozen=True)
class PlanBenchmark:
    """What one row takes, and ``BATCH_ROWS`` of them (None where they would take too long), on one thread.

    ``costs`` is a reading of the graph alone.
    """

    __pydantic_config__ = ONLY_FIGURES

    one: PairedSeconds
    several: PairedSeconds | None
    costs: ForwardSeconds

    @property
    def by_rows(self) -> dict[int, PairedSeconds]:
        """The pairs that were measured, by the rows of their batch."""
        return {rows: pairs for rows, pairs in ((1, self.one), (BATCH_ROWS, self.several)) if pairs}

    @property
    def speedup(self) -> float:
        """How much quicker the graph is than hooks: the geometric mean over both batches."""
        return geometric_mean(pairs.speedup for pairs in self.by_rows.values())

    @property
    def pays(self) -> bool:
        """Whether the graph is the quicker one."""
        return self.speedup > 1


def locate_benchmark(paths: Sequence[Path], cuda_graphs: Iterable[int], threads: int, device: torch.device) -> Path:
    """Where the benchmark of graphs in these files is kept: beside them, by all that their times depend on."""
    names = [path.name for path in paths]
    text = json.dumps([RECIPE, names, sorted(cuda_graphs), threads, describe_speed(device)])
    return paths[0].with_name(f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def read_benchmark(path: Path) -> PlanBenchmark | None:
    """What is kept in a file; None where there is none, or it can't be read."""
    try:
        return read_figures(path, PlanBenchmark)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("a warm plan's benchmark is not used", extra={"fields": {"reason": type(error).__name__}})
        return None


def keep_benchmark(path: Path, benchmark: PlanBenchmark) -> PlanBenchmark:
    """Keep a benchmark for later starts; what another process has kept meanwhile counts, so that all agree."""
    kept = read_benchmark(path)
    if kept is not None:
        return kept
    try:
        write_figures(path, asdict(benchmark))
    except OSError as error:
        reason = {"fields": {"reason": type(error).__name__}}
        log.warning("a warm plan's benchmark is not kept: the next start may decide otherwise", extra=reason)
    return benchmark
