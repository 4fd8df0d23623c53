"""``layertap extract``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from layertap.models.errors import LayertapError
from layertap.models.selection.hook_points import Reduction, Selector
from layertap.models.selection.poolings import POOLINGS
from layertap.service.cli.console import ConfigOption, ModelOption, stderr, stdout
from layertap.service.cli.output import FormatOption, OutOption, choose_output
from layertap.service.cli.setup import create_configured_engine

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
    config: ConfigOption = None,
) -> None:
    """Take layers of a model for pictures on disk, without a server; a summary without --out and --format.

    Pictures that can't be read are named and left out; the exit status is 1 then, and 2 where nothing is left.
    """
    output = choose_output(file, form)
    engine = create_configured_engine(config)
    from layertap.service.cli.extraction import extract_files
    from layertap.service.formats.reply_format import EncodeOptions

    reserved = output.format.reserved | output.format.reserved_for_files if output else frozenset[str]()
    selectors = parse_selectors(layers, _make_reduction(pool, normalize))
    features = asyncio.run(extract_files(engine, images, selectors, model, reserved))
    if output is None:
        stdout.print(_summarize(features))
    else:
        output.write(output.format.encode(features, EncodeOptions()))
        stderr.print(f"{output.name}: {features.rows} rows, fingerprint {features.fingerprint}", markup=False)
    for warning in features.warnings:
        stderr.print(warning, markup=False)
    if features.skipped:
        raise typer.Exit(1)


def _make_reduction(pool: str, normalize: bool) -> Reduction:
    if pool not in POOLINGS:
        raise LayertapError(f"there is no pool {pool!r}", hint=f"use one of {POOLS}")
    return Reduction(pool=pool, normalize=normalize)


def parse_selectors(layers: str, reduction: Reduction) -> tuple[Selector, ...]:
    """Selectors that are separated by commas, all reduced in the same way; SelectorError."""
    from layertap.models.selection.selectors import parse_selector

    return tuple(replace(parse_selector(name), reduction=reduction) for name in layers.split(",") if name)


def _summarize(features: Features) -> Table:
    table = Table("layer", "shape", "dtype", "mean", "std", "min", "max")
    for key, array in features.arrays.items():
        figures = (array.mean(), array.std(), array.min(), array.max())
        table.add_row(key, "×".join(map(str, array.shape)), array.dtype.name, *(f"{figure:.4g}" for figure in figures))
    return table
