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
    from layertap.models.inputs.model_inputs import ModelInputs
    from layertap.models.registry import Registry
    from layertap.models.spec import ModelSpec


def check(
    index: Annotated[
        Path | None,
        typer.Argument(
            help="A .json, .safetensors or .parquet file with receipts, or a folder of bulk: are its vectors still "
            "like those made here? Status 1 where they are not."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to compare with. Default: the model of the same name.")
    ] = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Check settings, configuration and models without serving; status 2 where something is wrong.

    Models are loaded one after another, but for lazy ones whose weights would be downloaded. One that is not required
    may fail. With --url: prints the state of each model. With INDEX: whether the vectors that it holds may still be
    compared with those that are made here, or by the server.
    """
    if index is not None:
        from layertap.service.cli.index_check import check_index

        if not asyncio.run(check_index(index, model, url, config)):
            raise typer.Exit(1)
        return
    if url is not None:
        if not asyncio.run(_check_server(url, config)):
            raise typer.Exit(2)
        return
    settings, configuration, fetcher = check_setup(config=config)

    from layertap.service.app import create_engine

    settings = settings.model_copy(update={"workers": 0})  # what ends soon starts no processes
    registry = create_engine(settings, configuration, fetcher, warm=False).manager.registry
    skipped = [entry.spec.name for entry in registry if entry.spec.load == "lazy" and entry.spec.downloads]
    failed = False
    for spec in [entry.spec for entry in registry if entry.spec.name not in skipped]:
        try:
            with show_loading(spec.name):
                state = _load(registry, spec)
        except LayertapError as error:
            failed, state = failed or spec.required, f"failed: {format_error(error)}"
        _print_state(spec.name, state)
    if skipped:
        _print_state(format_list(skipped, "models"), "not loaded, for weights would be downloaded")
    if failed:
        raise typer.Exit(2)


async def _check_server(url: str, config: Path | None) -> bool:
    """Print the state of each model of a server; whether none has failed."""
    async with connect(url, config) as client:
        models = await client.models()
    for each in models:
        layers = [f"{each.details['layers']} layers"] if "layers" in each.details else []
        reason = [each.details["reason"]] if "reason" in each.details else []
        _print_state(each.name, ", ".join([f"{each.state} on {each.device}", each.dtype, *layers, *reason]))
    return all(each.state != "failed" for each in models)


def _load(registry: Registry, spec: ModelSpec) -> str:
    """What a model is once loaded; LayertapError where it can't be, or a warm plan names what is not there."""
    from layertap.models.compiled.prepare import make_warm_plan

    model = registry.load_model(spec)
    for warm in model.spec.warm:
        make_warm_plan(model, warm)
    facts = [f"ready on {model.device_name}", model.spec.precision, f"{len(model.catalog.layers)} layers"]
    if model.model_embedding is not None:
        facts.append(f"embedding {model.model_embedding.selector.text}")
    return ", ".join(facts + [each for each in [_describe_pictures(model.model_inputs)] if each])


def _print_state(name: str, state: str) -> None:
    say(f"{name}: {state}")


def _describe_pictures(inputs: ModelInputs) -> str:
    """Whether pictures take the fast path, or why none are taken."""
    from layertap.models.inputs.preprocess import LibraryProcessor

    if inputs.sound is not None:
        return f"sounds through {inputs.sound.name}, at {inputs.sound.rate} samples a second"
    if inputs.video is not None:
        return f"videos through {inputs.video.name}, of which it takes {inputs.video.frames} frames"
    how = inputs.preprocess
    if how is None or not inputs.takes_pictures:
        return f"no pictures: {inputs.no_pictures}" if inputs.no_pictures else ""
    return f"pictures through {how.name}" if isinstance(how, LibraryProcessor) else "pictures on the fast path"
