"""``layertap models`` and ``layertap layers``: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from layertap.service.cli.console import show_loading, stdout
from layertap.service.cli.options import ConfigOption
from layertap.service.cli.setup import create_configured_engine


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


def layers(model: Annotated[str, typer.Argument(help="Model name.")], config: ConfigOption = None) -> None:
    """Show a model's layers as a tree, with the shapes that one row has."""
    from layertap.models.catalog.layer_tree import format_tree

    registry = create_configured_engine(config).manager.registry
    with show_loading(model):
        catalog = registry.load(model).catalog
    tree = format_tree(model, catalog.layers.values())
    stdout.print(tree, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)
