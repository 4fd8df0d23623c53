"""``layertap models`` and ``layertap layers``: what there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from layertap.service.cli.console import ConfigOption, show_loading, stderr, stdout
from layertap.service.cli.setup import create_configured_engine

if TYPE_CHECKING:
    from layertap.models.catalog.catalog import Catalog, Layer


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
    config: ConfigOption = None,
) -> None:
    """Show a model's layers as a tree: shapes of one row, parameters, shares of the forward's cost, hazards."""
    from layertap.models.catalog.layer_tree import format_tree, list_rows
    from layertap.models.model_catalogs import ModelCatalogs
    from layertap.models.selection.matches import filter_layers
    from layertap.service.cli.layer_table import print_layers
    from layertap.service.http.model_descriptions import describe_layers

    registry = create_configured_engine(config).manager.registry
    with show_loading(model):
        loaded = registry.load(model)
        if functions and isinstance(loaded.catalogs, ModelCatalogs):  # which it is: this command starts no workers
            loaded.catalogs.survey(loaded.shapes, functions=True)
    chosen = filter_layers(loaded.catalog, match, kind, leaf)
    if as_json:
        _print(json.dumps(describe_layers(loaded, chosen, functions=functions), indent=2) + "\n")
    elif not stdout.is_terminal:
        _print(format_tree(model, chosen, functions=functions))
    else:
        print_layers(stdout, list_rows(model, chosen, functions=functions))
        stderr.print(_summarize(loaded.catalog, chosen), style="bright_black", highlight=False, markup=False)


def _summarize(catalog: Catalog, chosen: Sequence[Layer]) -> str:
    """What the tree is of."""
    total, shown = len(catalog.layers), len(chosen)
    count = f"{total} layers" if shown == total else f"{shown} of {total} layers"
    return f"\n{count}, a forward of one row takes {catalog.seconds * 1000:.3g} ms"


def _print(text: str) -> None:
    stdout.print(text, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)
