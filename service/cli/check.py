"""``layertap check``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.models.errors import LayertapError
from layertap.service.cli.console import ConfigOption, UrlOption, format_error, format_list, say, show_loading
from layertap.service.cli.setup import check_setup, connect

if TYPE_CHECKING:
    from layertap.models.model_info import ModelInfo
    from layertap.models.registry import Registry


def check(
    index: Annotated[
        str | None,
        typer.Argument(
            help="A .npz, .safetensors or .json file with receipts, or the URL of a running server: are its vectors "
            "still like those made here? Status 1 where they are not."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to compare with; by its own name without.")
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Check settings, configuration and models without serving; status 2 where something is wrong.

    Models are loaded one after another, but for lazy ones whose weights would be downloaded. One that is not required
    may fail. With --url: the states of a server's models. With INDEX: whether the vectors that it holds may still be
    compared with those that are made here, or by the server.
    """
    if index is not None:
        if not asyncio.run(_check_index(index, model, url, config)):
            raise typer.Exit(1)
        return
    if url is not None:
        if not asyncio.run(_check_server(url, config)):
            raise typer.Exit(2)
        return
    settings, configuration, fetcher = check_setup(config=config)

    from layertap.service.app import create_engine
    from layertap.service.cli.picture_cost import compare_deep_pictures

    settings = settings.model_copy(update={"workers": 0})  # what ends soon starts no processes
    registry = create_engine(settings, configuration, fetcher, warm=False).manager.registry
    skipped = [entry.spec.name for entry in registry if entry.spec.load == "lazy" and entry.spec.downloads]
    failed = pictures = False
    for spec in [entry.spec for entry in registry if entry.spec.name not in skipped]:
        try:
            with show_loading(spec.name):
                loaded, state = _load(registry, spec.name)
                pictures |= loaded.model_inputs.takes_pictures
        except LayertapError as error:
            failed, state = failed or spec.required, f"failed: {format_error(error)}"
        _print_state(spec.name, state)
        registry.unload(spec.name)
    if pictures and (deep := compare_deep_pictures()):
        _print_state("pictures", deep)
    if skipped:
        _print_state(format_list(skipped, "models"), "not loaded, for weights would be downloaded")
    if failed:
        raise typer.Exit(2)


async def _check_index(index: str, model: str | None, url: str | None, config: Path | None) -> bool:
    from layertap.service.cli.index_check import check_stored
    from layertap.service.cli.stored_receipts import read_stored_receipts

    stored = read_stored_receipts(index, model)
    async with connect(url, config, *(model or each.model for each in stored)) as client:
        return await check_stored(client, stored, model)


async def _check_server(url: str, config: Path | None) -> bool:
    """Print the state of each model of a server; whether none has failed."""
    async with connect(url, config) as client:
        models = await client.models()
    for each in models:
        layers = [f"{each.details['layers']} layers"] if "layers" in each.details else []
        reason = [each.details["reason"]] if "reason" in each.details else []
        _print_state(each.name, ", ".join([f"{each.state} on {each.device}", each.dtype, *layers, *reason]))
    return all(each.state != "failed" for each in models)


def _load(registry: Registry, name: str) -> tuple[ModelInfo, str]:
    """A model, and what it is once loaded; LayertapError where it can't be, or a warm plan names what is not there."""
    from layertap.models.compiled.prepare import make_warm_plan
    from layertap.service.cli.picture_cost import describe_pictures

    model = registry.load(name)
    for warm in model.spec.warm:
        make_warm_plan(model, warm)
    facts = [f"ready on {model.device_name}", model.spec.precision, f"{len(model.catalog.layers)} layers"]
    return model, ", ".join(facts + [each for each in [describe_pictures(model.model_inputs)] if each])


def _print_state(name: str, state: str) -> None:
    say(f"{name}: {state}")
