"""``layertap models`` and ``layertap layers``: what there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from layertap.service.cli.console import ConfigOption, UrlOption, say, stdout, tell
from layertap.service.cli.setup import connect, create_configured_engine


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
