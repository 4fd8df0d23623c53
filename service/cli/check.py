"""``layertap check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from layertap.models.errors import LayertapError
from layertap.service.cli.console import format_error, format_list, show_loading, stdout
from layertap.service.cli.options import ConfigOption
from layertap.service.cli.setup import check_setup

if TYPE_CHECKING:
    from layertap.models.registry import Registry


def check(config: ConfigOption = None) -> None:
    """Check settings, configuration and models without serving; status 2 where something is wrong.

    Models are loaded one after another, but for lazy ones whose weights would be downloaded. One that is not required
    may fail.
    """
    settings, configuration, fetcher = check_setup(config=config)
    from layertap.service.app import create_engine

    settings = settings.model_copy(update={"workers": 0})  # what ends soon starts no processes
    registry = create_engine(settings, configuration, fetcher, warm=False).manager.registry
    skipped = [entry.spec.name for entry in registry if entry.spec.load == "lazy" and entry.spec.downloads]
    failed = False
    for spec in [entry.spec for entry in registry if entry.spec.name not in skipped]:
        try:
            with show_loading(spec.name):
                state = _load(registry, spec.name)
        except LayertapError as error:
            failed, state = failed or spec.required, f"failed: {format_error(error)}"
        _print_state(spec.name, state)
        registry.unload(spec.name)
    if skipped:
        _print_state(format_list(skipped, "models"), "not loaded, for weights would be downloaded")
    if failed:
        raise typer.Exit(2)


def _load(registry: Registry, name: str) -> str:
    """What a model is once it is loaded; LayertapError where it can't be, or a warm plan names what is not there."""
    from layertap.models.compiled.prepare import make_warm_plan

    model = registry.load(name)
    for warm in model.spec.warm:
        make_warm_plan(model, warm)
    return f"ready on {model.device}, {model.spec.precision}, {len(model.catalog.layers)} layers"


def _print_state(name: str, state: str) -> None:
    stdout.print(f"{name}: {state}", markup=False, highlight=False, soft_wrap=True)
