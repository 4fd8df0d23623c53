"""What a layertap server says of itself at ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.startup import HOST

BATCH_ROWS = "layertap_batch_rows"


@dataclass(frozen=True)
class BatchRows:
    """Forwards so far of all models: how many had at most so many rows, and the rows of all."""

    forwards: Mapping[float, float]
    rows: float


def scrape(port: int) -> Iterator[Sample]:
    """Every value of the server at this port."""
    with urlopen(f"http://{HOST}:{port}/metrics") as reply:
        return parse_samples(reply.read().decode())


def parse_samples(text: str) -> Iterator[Sample]:
    """Every value in Prometheus' text format."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def read_batch_rows(port: int) -> BatchRows:
    """The histogram of rows of the server at this port."""
    return sum_batch_rows(scrape(port))


def sum_batch_rows(samples: Iterable[Sample]) -> BatchRows:
    """The histogram of rows, models put together."""
    forwards: dict[float, float] = {}
    rows = 0.0
    for sample in samples:
        if sample.name == f"{BATCH_ROWS}_bucket":
            edge = float(sample.labels["le"])
            forwards[edge] = forwards.get(edge, 0.0) + sample.value
        elif sample.name == f"{BATCH_ROWS}_sum":
            rows += sample.value
    return BatchRows(forwards, rows)


def get_rows_per_forward(before: BatchRows, after: BatchRows) -> dict[str, Any]:
    """How many rows the forwards between two readings had; empty where there was none.

    ``rows_mean``; ``rows_median``: half of the forwards had at most so many, as far as the histogram's edges tell;
    ``single_forwards`` is the share of forwards with one row, ``single_rows`` the share of rows that ran so, 0 to 1.
    ``forwards`` counts them by the edge of the histogram that they are below or on.
    """
    counts = {edge: number - before.forwards.get(edge, 0.0) for edge, number in sorted(after.forwards.items())}
    rows, forwards = after.rows - before.rows, max(counts.values(), default=0.0)
    if not forwards:
        return {}
    median = next(edge for edge, number in counts.items() if number >= forwards / 2)
    lower = dict(zip(counts, [0.0, *counts.values()], strict=False))
    return {
        "rows_mean": rows / forwards,
        "rows_median": median if isfinite(median) else max(filter(isfinite, counts)),
        "single_forwards": counts[1.0] / forwards,
        "single_rows": counts[1.0] / rows,
        "forwards": {f"{edge:g}": int(number - lower[edge]) for edge, number in counts.items()},
    }
