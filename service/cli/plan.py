"""``layertap plan``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from layertap.service.cli.console import ConfigOption, show_loading, stdout
from layertap.service.cli.setup import create_configured_engine

if TYPE_CHECKING:
    from layertap.models.compiled.plan_benchmark import PlanBenchmark


def plan(config: ConfigOption = None) -> None:
    """Compile the warm plans of all configured models now, so that a server finds them; minutes for each new one.

    Times are of one row of a batch, on one thread.
    """
    from layertap.service.allocator import keep_large_blocks

    keep_large_blocks()  # as the server does: hooks and graphs are measured
    registry = create_configured_engine(config, warm=True).manager.registry
    table = Table("model", "layers", "answered by", "rows", "hooks, ms", "graph, ms", "speedup")
    for entry in registry:
        if entry.spec.warm:
            with show_loading(entry.spec.name, "compiling"):
                model = registry.load(entry.spec.name)
            for warm, compiled, benchmark in zip(entry.spec.warm, model.compiled, model.benchmarks, strict=True):
                titles = entry.spec.name, ", ".join(warm.layers), "a graph" if compiled else "hooks"
                seconds = model.catalog.costs.estimate_seconds(1)
                for figures in _list_figures(benchmark) if benchmark else [("1", f"{seconds * 1000:.1f}", "", "")]:
                    table.add_row(*titles, *figures)
                    titles = "", "", ""
    stdout.print(table)


def _list_figures(benchmark: PlanBenchmark) -> Iterator[tuple[str, ...]]:
    """Of each batch: rows, milliseconds a row with hooks and by the graph, and the speedup."""
    for rows, pairs in benchmark.by_rows.items():
        milliseconds = (f"{seconds * 1000 / rows:.1f}" for seconds in (pairs.hooks, pairs.graph))
        yield str(rows), *milliseconds, f"{pairs.speedup:.2f}"
