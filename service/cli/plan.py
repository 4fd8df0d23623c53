"""``layertap plan``."""

from __future__ import annotations

from rich.table import Table

from layertap.service.cli.console import show_loading, stdout
from layertap.service.cli.options import ConfigOption
from layertap.service.cli.setup import create_configured_engine


def plan(config: ConfigOption = None) -> None:
    """Compile the warm plans of all configured models now, so that a server finds them; minutes for each new one."""
    registry = create_configured_engine(config, warm=True).manager.registry
    table = Table("model", "layers", "answered by", "ms a row", "with hooks")
    for entry in registry:
        if entry.spec.warm:
            with show_loading(entry.spec.name, "compiling"):
                model = registry.load(entry.spec.name)
            for warm, compiled in zip(entry.spec.warm, model.compiled, strict=True):
                costs = compiled.costs if compiled else model.catalog.costs
                figures = (f"{each.estimate_seconds(1) * 1000:.1f}" for each in (costs, model.catalog.costs))
                table.add_row(entry.spec.name, ", ".join(warm.layers), "a graph" if compiled else "hooks", *figures)
    stdout.print(table)
