"""``layertap show``."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from layertap.models.errors import LayertapError
from layertap.models.selection.hook_points import Reduction
from layertap.service.cli.console import stderr, stdout
from layertap.service.cli.extract import choose_format, parse_selectors
from layertap.service.cli.options import ConfigOption, ModelOption
from layertap.service.cli.setup import create_configured_engine
from layertap.service.pictures.options import MAX_TILES, Order

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")  # where neither is set on Linux, nobody would see a window


def show(
    image: Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)],
    layers: Annotated[str, typer.Argument(help="Layer selectors, separated by commas.")],
    file: Annotated[
        Path | None, typer.Option("--out", help="A .png or .webp file; without it the picture is opened.")
    ] = None,
    tiles: Annotated[int, typer.Option(help="How many channels or heads of each layer.", min=1, max=MAX_TILES)] = 16,
    strongest: Annotated[bool, typer.Option(help="The strongest ones, in place of the first.")] = False,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw what layers see of a picture, and open it; without a screen, say where it is."""
    out = file or Path(tempfile.mkdtemp(prefix="layertap-")) / "layers.png"
    reply_format = choose_format(out)
    if not reply_format.is_picture:
        raise LayertapError(f"{out} is no picture", hint="use a name that ends in .png or .webp, or layertap extract")
    selectors = parse_selectors(layers, Reduction())
    engine = create_configured_engine(config)
    from layertap.service.cli.extraction import extract_shown
    from layertap.service.formats.reply_format import EncodeOptions
    from layertap.service.pictures.options import PictureOptions

    order: Order = "strongest" if strongest else "first"
    features, sent = asyncio.run(extract_shown(engine, image, selectors, model, reply_format.reserved))
    buffers = reply_format.encode(features, EncodeOptions(picture=PictureOptions(tiles, order), sent=[sent]))
    with out.open("wb") as stream:
        stream.writelines(buffers)
    if file is None and (os.name == "nt" or any(map(os.environ.get, SCREENS))):
        typer.launch(str(out))
    stdout.print(str(out), markup=False, soft_wrap=True, highlight=False)
    stderr.print(f"fingerprint {features.fingerprint}", markup=False)
