"""``layertap layers`` and ``layertap plan``: what a model is made of, and what answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.table import Table

from layertap.service.cli.console import ConfigOption, UrlOption, say, show_loading, stdout
from layertap.service.cli.setup import connect, create_configured_engine

if TYPE_CHECKING:
    from layertap.models.run.compiled_plan import CompiledPlan


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
    """Show a model's layers as a tree: shapes of one row, parameters, the forward's cost up to each."""
    params = {"match": match, "type": kind, "leaf": leaf, "functions": functions or None}
    accept = "application/json" if as_json else "text/plain"

    async def run() -> bytes:
        async with connect(url, config, model) as client:
            return bytes((await client.get(f"/models/{quote(model, safe='')}/layers", params, accept=accept)).body)

    body = asyncio.run(run())
    say(json.dumps(json.loads(body), indent=2) + "\n" if as_json else body.decode(), end="")


def plan(config: ConfigOption = None) -> None:
    """Compile the warm plans of all configured models now, so that a server finds them; minutes for each new one.

    Times are of one row of a batch, on one thread.
    """
    from layertap.service.allocator import keep_large_blocks

    keep_large_blocks()  # as the server does: hooks and graphs are measured
    registry = create_configured_engine(config, compiles=True).manager.registry
    table = Table("model", "layers", "answered by", "rows", "hooks, ms", "graph, ms", "speedup")
    for entry in registry:
        if entry.spec.warm:
            with show_loading(entry.spec.name, "compiling"):
                model = registry.load_model(entry.spec)
            for warm, compiled in zip(entry.spec.warm, model.compiled, strict=True):
                titles = entry.spec.name, ", ".join(warm.layers), "a graph" if compiled else "hooks"
                seconds = model.catalog.costs.estimate_seconds(1)
                for figures in _list_figures(compiled) if compiled else [("1", f"{seconds * 1000:.1f}", "", "")]:
                    table.add_row(*titles, *figures)
                    titles = "", "", ""
    stdout.print(table)


def _list_figures(compiled: CompiledPlan) -> Iterator[tuple[str, ...]]:
    """Of each batch: rows, milliseconds a row with hooks and by the graph, and the speedup."""
    for rows in (1, 8):
        hooks, graph = (costs.estimate_seconds(rows) for costs in (compiled.hooked_costs, compiled.costs))
        milliseconds = (f"{seconds * 1000 / rows:.1f}" for seconds in (hooks, graph))
        yield str(rows), *milliseconds, f"{hooks / graph:.2f}"
