"""``layertap show`` and ``layertap explain``: what a model makes of a picture, to be looked at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from layertap.models.errors import LayertapError
from layertap.models.selection.hook_points import Method
from layertap.service.cli.console import ConfigOption, ModelOption, UrlOption, say, tell
from layertap.service.cli.output import STDOUT, FormatOption, OutOption, Output, choose_output, choose_picture
from layertap.service.cli.setup import connect
from layertap.service.pictures.options import MAX_TILES

if TYPE_CHECKING:
    from layertap_client import Reply

METHODS = ", ".join(get_args(Method))
HINTS = {"classes": "write --classes 3,top", "objective": "write --objective probability"}
PictureArgument = Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)]


def show(
    image: PictureArgument,
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
    reply = asyncio.run(_ask(url, config, "/extract", image, fields, output))
    output.write([reply.body])
    if output.file not in (None, STDOUT):
        say(str(output.file))
    tell(f"fingerprint {reply.headers['x-layertap-fingerprint']}")


def explain(
    image: PictureArgument,
    method: Annotated[str, typer.Option(help=f"One of {METHODS}, or several separated by commas.")],
    file: OutOption = None,
    form: FormatOption = None,
    classes: Annotated[str | None, typer.Option(help="Numbers or top, separated by commas: a map of each.")] = None,
    top_classes: Annotated[int | None, typer.Option(help="How many of the best classes are named; 5 without.")] = None,
    layer: Annotated[str | None, typer.Option(help="The layer that Grad-CAM is of.")] = None,
    objective: Annotated[str | None, typer.Option(help="A kind, as probability, or an object in JSON.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of integrated_gradients, between zeros and the picture.")] = None,
    samples: Annotated[int | None, typer.Option(help="Of smoothgrad, each with its own noise.")] = None,
    noise: Annotated[float | None, typer.Option(help="Of smoothgrad, by the range of the input's values.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of that noise.")] = None,
    window: Annotated[int | None, typer.Option(help="Of occlusion, in pixels that the model sees.")] = None,
    stride: Annotated[int | None, typer.Option(help="Of occlusion: from one window to the next.")] = None,
    discard_ratio: Annotated[float | None, typer.Option(help="Of rollouts: the share of attention left out.")] = None,
    model: ModelOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw maps of what speaks for a model's answer to a picture, and name the best classes.

    Without --out and --format the picture is opened, as by show. .npz, .json and others hold the maps as arrays.
    """
    output = choose_output(file, form) or choose_picture(None, None)
    given = {
        "method": method,
        "classes": classes,
        "top_classes": top_classes,
        "layer": layer,
        "objective": objective,
        "steps": steps,
        "samples": samples,
        "noise": noise,
        "seed": seed,
        "window": window,
        "stride": stride,
        "discard_ratio": discard_ratio,
        "model": model,
    }
    fields = {name: None if value is None else str(value) for name, value in given.items()}
    reply = asyncio.run(_explain(url, config, image, fields, output))
    output.write([reply.body])
    for best in json.loads(reply.headers.get("x-layertap-top-classes", "[]")):
        name = f" {best['label']}" if "label" in best else ""
        share = f", {best['probability']:.1%}" if best.get("probability") is not None else ""
        tell(f"class {best['class']}{name}: {nan if best['score'] is None else best['score']:.4g}{share}")
    written = f"{output.name}: " if output.file is not None else ""
    tell(f"{written}{method.replace(',', ', ')}, fingerprint {reply.headers['x-layertap-fingerprint']}")
    if warnings := reply.headers.get("x-layertap-warnings"):
        tell(warnings)


async def _explain(
    url: str | None, config: Path | None, image: Path, fields: Mapping[str, str | None], output: Output
) -> Reply:
    """The reply; an error in a field names the option that the field came from."""
    try:
        return await _ask(url, config, "/explain", image, fields, output)
    except LayertapError as error:
        faults: Sequence[Any] = getattr(error.__cause__, "faults", ())
        name = faults[0].pointer.split("/")[1] if faults and faults[0].pointer else ""
        if name not in fields:
            raise
        hint = HINTS.get(name, faults[0].hint)
        raise LayertapError(f"--{name.replace('_', '-')}: {faults[0].detail}", hint=hint) from None


async def _ask(
    url: str | None, config: Path | None, path: str, image: Path, fields: Mapping[str, str | None], output: Output
) -> Reply:
    """The reply to a picture on disk, in the format of ``output``; LayertapError.

    ``fields`` are those of a body, as query parameters say them.
    """
    from layertap.service.inputs.files import FileError, read_regular_file

    try:
        picture = read_regular_file(image)
    except FileError as error:
        raise LayertapError(f"{image}: {error}") from None
    async with connect(url, config, fields["model"]) as client:
        return await client.post(path, picture, fields, accept=output.format.media_type)
