"""``layertap extract``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from layertap.models.errors import LayertapError
from layertap.models.selection.poolings import POOLINGS
from layertap.service.cli.console import ConfigOption, ModelOption, UrlOption, stderr, stdout
from layertap.service.cli.output import FormatOption, OutOption, choose_output
from layertap.service.cli.setup import connect

if TYPE_CHECKING:
    from layertap.service.features import Features

POOLS = ", ".join(POOLINGS)


def extract(
    images: Annotated[list[Path], typer.Argument(help="Pictures.", exists=True, dir_okay=False, readable=False)],
    layers: Annotated[str, typer.Option(help="Layer selectors, separated by commas.")],
    model: ModelOption = None,
    pool: Annotated[str, typer.Option(help=f"One of {POOLS}.")] = "none",
    normalize: Annotated[bool, typer.Option(help="L2 over the last axis of pooled results.")] = False,
    file: OutOption = None,
    form: FormatOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Take layers of a model for pictures on disk; a summary without --out and --format.

    Pictures that can't be read are named and left out; the exit status is 1 then, and 2 where nothing is left.
    """
    output = choose_output(file, form)
    if pool not in POOLINGS:
        raise LayertapError(f"there is no pool {pool!r}", hint=f"use one of {POOLS}")
    reserved = output.format.reserved | output.format.reserved_for_files if output else frozenset[str]()
    options = {"model": model, "pool": pool, "normalize": normalize}

    async def run() -> Features:
        async with connect(url, config, model) as client:
            from layertap.service.cli.extraction import FileExtraction

            return await FileExtraction(client, images, split_layers(layers), options, reserved).run()

    features = asyncio.run(run())
    if output is None:
        stdout.print(_summarize(features))
    else:
        from layertap.service.formats.reply_format import EncodeOptions

        output.write(output.format.encode(features, EncodeOptions()))
        stderr.print(f"{output.name}: {features.rows} rows, fingerprint {features.fingerprint}", markup=False)
    for warning in features.warnings:
        stderr.print(warning, markup=False)
    if features.skipped:
        raise typer.Exit(1)


def split_layers(layers: str) -> list[str]:
    """Selectors that are separated by commas; LayertapError where there are none."""
    names = [name for name in layers.split(",") if name]
    if not names:
        raise LayertapError("name at least one layer", hint="write --layers NAME,NAME")
    return names


def _summarize(features: Features) -> Table:
    table = Table("layer", "shape", "dtype", "mean", "std", "min", "max")
    for key, array in features.arrays.items():
        figures = (array.mean(), array.std(), array.min(), array.max())
        table.add_row(key, "×".join(map(str, array.shape)), array.dtype.name, *(f"{figure:.4g}" for figure in figures))
    return table
