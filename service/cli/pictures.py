"""``layertap extract``, ``show`` and ``explain``: what a model makes of pictures on disk, in one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from layertap.models.errors import LayertapError
from layertap.models.plan.requested import Method
from layertap.models.spec import Pool
from layertap.service.cli.console import ConfigOption, ModelOption, UrlOption, say, tell
from layertap.service.cli.output import STDOUT, FormatOption, OutOption, choose_output, choose_picture
from layertap.service.cli.setup import connect
from layertap.service.types import MAX_TILES

if TYPE_CHECKING:
    from layertap_client import Fault, Reply

METHODS = ", ".join(get_args(Method))
HINTS = {"classes": "write --classes 3,top", "objective": "write --objective probability"}
MANY = "layertap bulk takes any number of pictures"
SUMMARIZED = "application/x-safetensors"
PictureArgument = Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)]


def extract(
    images: Annotated[list[Path], typer.Argument(help="Pictures.", exists=True, dir_okay=False, readable=False)],
    layers: Annotated[str, typer.Option(help="Layer selectors, separated by commas.")],
    model: ModelOption = None,
    pool: Annotated[Pool, typer.Option(help="What makes a vector of each picture.")] = "none",
    normalize: Annotated[bool, typer.Option(help="L2 over the last axis of pooled results.")] = False,
    file: OutOption = None,
    form: FormatOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Take layers of a model for pictures on disk, as many as a request may have; bulk takes more.

    Without --out and --format a summary is printed.
    """
    output = choose_output(file, form)
    named = [name for name in layers.split(",") if name]
    if not named:
        raise LayertapError("name at least one layer", hint="write --layers NAME,NAME")
    options = {"layers": named, "pool": pool, "normalize": normalize, "model": model}
    fields = {**options, "isolated": True, "probe": True}  # isolated: the same bits every time
    accept = output.format.media_type if output else SUMMARIZED
    reply = asyncio.run(_ask(url, config, "/extract", images, fields, accept, options))
    if output is None:
        from layertap_client.results import read_result

        say(repr(read_result(reply)))
    else:
        output.write(reply.body)
        tell(f"{output.name}: fingerprint {reply.headers['x-layertap-fingerprint']}")
        _tell_warnings(reply)


def show(
    image: PictureArgument,
    layers: Annotated[str, typer.Argument(help="Layer selectors, separated by commas.")],
    file: Annotated[
        Path | None,
        typer.Option("--out", help="A .png file, - for stdout; without it the picture is opened."),
    ] = None,
    tiles: Annotated[int, typer.Option(help="How many channels or heads of each layer.", min=1, max=MAX_TILES)] = 16,
    model: ModelOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw what layers see of a picture, and open it; without a screen, say where it is."""
    output = choose_picture(file)
    fields = {"model": model, "layers": layers, "tiles": str(tiles), "isolated": "true"}
    reply = asyncio.run(_ask(url, config, "/extract", [image], fields, output.format.media_type))
    output.write(reply.body)
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
    layer: Annotated[str | None, typer.Option(help="The layer that a CAM is of.")] = None,
    objective: Annotated[str | None, typer.Option(help="A kind, as probability, or an object in JSON.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of integrated_gradients, from baseline to picture.")] = None,
    samples: Annotated[int | None, typer.Option(help="Of smoothgrad, each with its own noise.")] = None,
    noise: Annotated[float | None, typer.Option(help="Of smoothgrad, by the range of the input's values.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of that noise.")] = None,
    window: Annotated[int | None, typer.Option(help="Of occlusion, in pixels that the model sees.")] = None,
    stride: Annotated[int | None, typer.Option(help="Of occlusion: from one window to the next.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Of integrated_gradients and occlusion: a number in place of zeros, or blur.")
    ] = None,
    discard_ratio: Annotated[float | None, typer.Option(help="Of rollouts: the share of attention left out.")] = None,
    rule: Annotated[str | None, typer.Option(help="Whose code's numbers: vit-explain, or pytorch-grad-cam.")] = None,
    model: ModelOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw maps of what speaks for a model's answer to a picture, and name the best classes.

    Without --out and --format the picture is opened, as by show. .npz, .json and others hold the maps as arrays.
    """
    output = choose_output(file, form) or choose_picture(None)
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
        "baseline": baseline,
        "discard_ratio": discard_ratio,
        "rule": rule,
        "model": model,
    }
    fields = {name: None if value is None else str(value) for name, value in given.items()}
    reply = asyncio.run(_ask(url, config, "/explain", [image], fields, output.format.media_type, fields))
    output.write(reply.body)
    for best in json.loads(reply.headers.get("x-layertap-top-classes", "[]")):
        name = f" {best['label']}" if "label" in best else ""
        share = f", {best['probability']:.1%}" if best.get("probability") is not None else ""
        tell(f"class {best['class']}{name}: {nan if best['score'] is None else best['score']:.4g}{share}")
    written = f"{output.name}: " if output.file is not None else ""
    tell(f"{written}{method.replace(',', ', ')}, fingerprint {reply.headers['x-layertap-fingerprint']}")
    _tell_warnings(reply)


def _tell_warnings(reply: Reply) -> None:
    if warnings := reply.headers.get("x-layertap-warnings"):
        tell(warnings)


async def _ask(
    url: str | None,
    config: Path | None,
    path: str,
    images: Sequence[Path],
    fields: Mapping[str, Any],
    accept: str,
    options: Collection[str] = (),
) -> Reply:
    """The reply to pictures on disk; LayertapError, which names the picture or the option that is wrong.

    ``fields`` are those of a body, ``options`` those that are options of the command.
    """
    from layertap.service.inputs.files import FileError, read_regular_file
    from layertap_client import TooLargeError

    pictures = []
    for image in images:
        try:
            pictures.append(read_regular_file(image))
        except FileError as error:
            raise LayertapError(f"{image}: {error}") from None
    try:
        async with connect(url, config, fields["model"]) as client:
            return await client.post(path, pictures, fields, accept=accept)
    except LayertapError as error:
        faults: Sequence[Fault] = getattr(error.__cause__, "faults", ())
        lines = [_describe(fault, images, options) for fault in faults]
        if any(lines) and not _is_of_all(faults, images):
            raise LayertapError("\n".join(filter(None, lines))) from None
        if isinstance(error.__cause__, TooLargeError) and len(images) > 1:
            raise LayertapError(error.detail, hint=MANY) from None
        raise


def _is_of_all(faults: Sequence[Fault], images: Sequence[Path]) -> bool:
    """Whether the same is wrong with each of several pictures: the model takes none."""
    return len(images) > 1 and len({fault.input for fault in faults if fault.detail == faults[0].detail}) == len(images)


def _describe(fault: Fault, images: Sequence[Path], options: Collection[str]) -> str:
    """The picture or the option that a fault is of, what is wrong, what to do; "" where it is of neither."""
    name = fault.pointer.split("/")[1] if fault.pointer else ""
    if fault.input is None and name not in options:
        return ""
    where = f"--{name.replace('_', '-')}" if fault.input is None else str(images[fault.input])
    hint = HINTS.get(name, fault.hint)
    return f"{where}: {fault.detail}" + (f" ({hint})" if hint else "")
