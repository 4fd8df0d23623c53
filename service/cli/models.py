"""``layertap models``, ``layertap layers`` and ``layertap plan``: what there is, and what answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from layertap.service.cli.console import ConfigOption, UrlOption, say, show_loading, stdout, tell
from layertap.service.cli.setup import connect, create_configured_engine

if TYPE_CHECKING:
    from layertap.models.compiled.plan_benchmark import PlanBenchmark


def models(config: ConfigOption = None) -> None:
    """List the configured models."""
    manager = create_configured_engine(config).manager
    table = Table("model", "source", "weights", "device", "dtype", "load")
    for entry in manager.registry:
        spec = entry.spec
        name = f"{spec.name} (default)" if spec.name == manager.default else spec.name
        table.add_row(
            name,
            spec.shown_source,
            Path(spec.weights).name,
            ", ".join(spec.devices) or spec.device,
            spec.dtype,
            spec.load,
        )
    stdout.print(table)


def layers(
    model: Annotated[str, typer.Argument(help="Model name.")],
    match: Annotated[str | None, typer.Option(help="A pattern that names fit: * and ? are special.")] = None,
    kind: Annotated[str | None, typer.Option("--type", help="The class of the layers, as Conv2d.")] = None,
    leaf: Annotated[bool | None, typer.Option("--leaf/--no-leaf", help="Those without parts, or those with.")] = None,
    functions: Annotated[bool, typer.Option(help="What the functions return that each layer calls.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the server describes them.")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a model's layers as a tree: shapes of one row, parameters, shares of the forward's cost, hazards."""
    params = {"match": match, "type": kind, "leaf": leaf, "functions": functions or None}
    asyncio.run(_show_layers(url, config, model, params, as_json))


async def _show_layers(
    url: str | None, config: Path | None, model: str, params: Mapping[str, Any], as_json: bool
) -> None:
    path = f"/models/{quote(model, safe='')}"
    async with connect(url, config, model) as client:
        if not as_json and not stdout.is_terminal:
            say((await client.get(f"{path}/layers", params, accept="text/plain")).body.decode(), end="")
            return
        document = (await client.get(f"{path}/layers", params)).read_json()
        if as_json:
            say(json.dumps(document, indent=2))
            return
        from layertap.service.cli.layer_table import print_layers
        from layertap.service.http.layer_tree import list_rows

        print_layers(stdout, list_rows(model, document["layers"]))
        shown, total = len(document["layers"]), (await client.model(model)).details["layers"]
        count = f"{total} layers" if shown == total else f"{shown} of {total} layers"
        tell(f"\n{count}, a forward of one row takes {document['seconds'] * 1000:.3g} ms", style="bright_black")


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
