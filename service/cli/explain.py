"""``layertap explain``."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args
from urllib.parse import urlencode

import typer

from layertap.models.errors import LayertapError, RequestError
from layertap.models.selection.hook_points import Method
from layertap.service.cli.console import ConfigOption, ModelOption, stderr
from layertap.service.cli.output import FormatOption, OutOption, choose_output, choose_picture
from layertap.service.cli.setup import create_configured_engine

if TYPE_CHECKING:
    from layertap.service.engine.engine import Engine
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.features import Features
    from layertap.service.pictures.overlay import SentPicture

    Pictures = tuple[SentPicture | None, ...]

DEADLINE_S = 3600
MAX_DEPTH = 4  # of an objective as JSON
METHODS = ", ".join(get_args(Method))
HINTS = {"classes": "write --classes 3,top", "objective": "write --objective probability"}


def explain(
    image: Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)],
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
    request = _make_request(image, {name: str(value) for name, value in given.items() if value is not None})
    features, pictures = asyncio.run(_explain(create_configured_engine(config), request))
    from layertap.service.formats.reply_format import EncodeOptions

    output.write(output.format.encode(features, EncodeOptions(sent=pictures)))
    for best in features.top_classes[0] if features.top_classes else ():
        name = f" {best.label}" if best.label is not None else ""
        share = f", {best.probability:.1%}" if best.probability is not None else ""
        stderr.print(f"class {best.number}{name}: {best.score:.4g}{share}", markup=False)
    written = f"{output.name}: " if output.file is not None else ""
    stderr.print(f"{written}{', '.join(features.arrays)}, fingerprint {features.fingerprint}", markup=False)
    for warning in features.warnings:
        stderr.print(warning, markup=False)


def _make_request(image: Path, given: dict[str, str]) -> ExtractRequest:
    """The request that a query with these parameters would make."""
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.http.parsing import validate_body
    from layertap.service.http.query import Query, read_fields
    from layertap.service.inputs.files import FileError, read_regular_file
    from layertap.service.inputs.items import ImageItem
    from layertap.service.schemas.bodies import ExplainBody

    query = Query.parse(urlencode(given).encode())
    try:
        body = validate_body(ExplainBody, read_fields(query, ExplainBody.model_fields.keys(), MAX_DEPTH))
    except RequestError as error:
        raise _name_option(error) from None
    try:
        picture = ImageItem(read_regular_file(image))
    except FileError as error:
        raise LayertapError(f"{image}: {error}") from None
    objective = body.layer_request.objective
    return ExtractRequest(
        model=body.model, items=((0, picture),), objective=objective, explanation=body.to_explanation()
    )


def _name_option(error: RequestError) -> LayertapError:
    """What is wrong with a field, as of the option that it came from."""
    fault = error.faults[0]
    name = (fault.pointer or "").split("/")[1:2]
    option = f"--{name[0].replace('_', '-')}: " if name else ""
    return LayertapError(option + fault.detail, hint=HINTS.get("".join(name), fault.hint))


async def _explain(engine: Engine, request: ExtractRequest) -> tuple[Features, Pictures]:
    """The maps, and the picture that they are of."""
    from layertap.service.explain.explanations import explain, prepare

    try:
        with engine.admission.admit(time.monotonic() + DEADLINE_S) as ticket:
            request = await prepare(engine, request, ticket)
            features = await explain(engine, request, ticket)
            return features, engine.list_pictures(request, features, ticket)
    finally:
        await engine.close()
