"""``layertap show``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from layertap.service.cli.console import ConfigOption, ModelOption, UrlOption, say, tell
from layertap.service.cli.output import STDOUT, ask_about_picture, choose_picture
from layertap.service.pictures.options import MAX_TILES


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
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw what layers see of a picture, and open it; without a screen, say where it is."""
    output = choose_picture(file, form)
    fields = {"model": model, "layers": layers, "tiles": str(tiles), "isolated": "true"}
    fields["order"] = "strongest" if strongest else "first"
    reply = asyncio.run(ask_about_picture(url, config, "/extract", image, fields, output))
    output.write([reply.body])
    if output.file not in (None, STDOUT):
        say(str(output.file))
    tell(f"fingerprint {reply.headers['x-layertap-fingerprint']}")
