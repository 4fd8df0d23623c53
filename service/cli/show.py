"""``layertap show``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from layertap.models.selection.hook_points import Reduction
from layertap.service.cli.console import ConfigOption, ModelOption, stderr, stdout
from layertap.service.cli.extract import parse_selectors
from layertap.service.cli.output import STDOUT, choose_picture
from layertap.service.cli.setup import create_configured_engine
from layertap.service.pictures.options import MAX_TILES, Order


def show(
    image: Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)],
    layers: Annotated[str, typer.Argument(help="Layer selectors, separated by commas.")],
    file: Annotated[
        Path | None,
        typer.Option("--out", help="A .png or .webp file, - for stdout; without it the picture is opened."),
    ] = None,
    form: Annotated[
        Literal["png", "webp"] | None, typer.Option("--format", help="To stdout where --out is not given.")
    ] = None,
    tiles: Annotated[int, typer.Option(help="How many channels or heads of each layer.", min=1, max=MAX_TILES)] = 16,
    strongest: Annotated[bool, typer.Option(help="The strongest ones, in place of the first.")] = False,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw what layers see of a picture, and open it; without a screen, say where it is."""
    output = choose_picture(file, form)
    selectors = parse_selectors(layers, Reduction())
    engine = create_configured_engine(config)
    from layertap.service.cli.extraction import extract_shown
    from layertap.service.formats.reply_format import EncodeOptions
    from layertap.service.pictures.options import PictureOptions

    order: Order = "strongest" if strongest else "first"
    features, sent = asyncio.run(extract_shown(engine, image, selectors, model, output.format.reserved))
    output.write(output.format.encode(features, EncodeOptions(picture=PictureOptions(tiles, order), sent=[sent])))
    if output.file not in (None, STDOUT):
        stdout.print(str(output.file), markup=False, soft_wrap=True, highlight=False)
    stderr.print(f"fingerprint {features.fingerprint}", markup=False)
