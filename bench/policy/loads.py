"""Loads of the simulation, and what a server of one model makes of one of them under a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, median, quantiles

from bench.policy.clients import add_closed_loop, add_open_loop
from bench.policy.models import MODELS
from bench.policy.rules import GROWING, RULES
from bench.policy.server import Record, SimulatedServer

ANSWERS = 2000  # of a run, about
ANSWERS_OF_CLIENT = 10  # at least, of a closed loop
LARGE_ROWS = 256
ANSWERS_OF_LARGE = 10  # at least
WARM_UP = 0.2  # of a run, before it
CAPACITY_CLIENTS = 64


@dataclass(frozen=True)
class Load:
    """``clients`` in closed loop, ``bulk`` ones beside them; or an open loop, as a share of the capacity.

    ``large``: clients beside them whose requests are of ``LARGE_ROWS`` rows each, and of all layers.
    """

    clients: int = 0
    bulk: int = 0
    large: int = 0
    share: float = 0.0

    @property
    def title(self) -> str:
        beside = f" and {self.bulk} of bulk" if self.bulk else f" and {self.large} large" if self.large else ""
        if self.share:
            return f"open loop, {self.share:.0%}{beside}"
        return f"{self.clients} client{'s' if self.clients > 1 else ''}{beside}"


LOADS = (
    *(Load(clients=2**power) for power in range(9)),
    *(Load(share=share) for share in (0.5, 0.8, 0.95)),
    Load(clients=4, bulk=16),
    Load(clients=4, bulk=64),
    Load(clients=4, large=1),
    Load(share=0.3, large=1),
)


@dataclass(frozen=True)
class Figures:
    """Answered rows a second, milliseconds of interactive requests of one row, rows of a forward, rows that ran alone.

    ``large_s``: seconds of requests of many rows; 0 where none came.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    rows: float
    lone_rows: float
    large_s: float


def simulate(model: str, load: Load, rule: str, cores: int, seed: int) -> Figures:
    """The figures of one run."""
    server = SimulatedServer(MODELS[model], RULES[rule], cores, seed)
    if load.share:
        add_open_loop(server, load.share * find_capacity(model, cores), seed)
    else:
        add_closed_loop(server, load.clients)
        add_closed_loop(server, load.bulk, "bulk")
    simulated, clients = MODELS[model], load.clients + load.bulk
    add_closed_loop(server, load.large, rows=LARGE_ROWS, row_bytes=simulated.layer_bytes)
    row_seconds = simulated.decode + simulated.receive + simulated.reply + simulated.costs.estimate_seconds(1)
    rows = max(ANSWERS, ANSWERS_OF_CLIENT * clients) + load.large * ANSWERS_OF_LARGE * LARGE_ROWS
    seconds = rows * row_seconds / cores
    server.run(WARM_UP * seconds)
    server.record = Record()
    server.run(seconds)
    return summarize(server.record, seconds)


@cache
def find_capacity(model: str, cores: int) -> float:
    """Answers a second that many clients in closed loop get."""
    return simulate(model, Load(clients=CAPACITY_CLIENTS), GROWING, cores, seed=0).per_s


def summarize(record: Record, seconds: float) -> Figures:
    """The figures of what has come out."""
    interactive = record.seconds["interactive"]
    percentiles = quantiles(interactive, n=100)
    rows = sum(rows * forwards for rows, forwards in record.forwards.items())
    return Figures(
        per_s=record.rows / seconds,
        p50_ms=1000 * percentiles[49],
        p99_ms=1000 * percentiles[98],
        rows=rows / record.forwards.total(),
        lone_rows=record.forwards[1] / rows,
        large_s=fmean(record.large_seconds or [0.0]),
    )


def compare(model: str, load: Load, rules: Sequence[str], cores: int, seeds: int) -> dict[str, dict[str, float]]:
    """Means over the seeds, by rule; ``…_ratio``: the median of a run's figure to that of the batcher as it is."""
    runs = {rule: [simulate(model, load, rule, cores, seed) for seed in range(seeds)] for rule in rules}
    compared = {}
    for rule, figures in runs.items():
        means = {name: fmean(getattr(run, name) for run in figures) for name in asdict(figures[0])}
        ratios = {
            f"{name}_ratio": median(
                getattr(run, name) / getattr(plain, name) for run, plain in zip(figures, runs[GROWING], strict=True)
            )
            for name in ("per_s", "p50_ms", "p99_ms")
        }
        compared[rule] = {name: round(value, 4) for name, value in (means | ratios).items()}
    return compared
