"""``layertap explain``."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from layertap.models.errors import LayertapError
from layertap.service.cli.console import stderr
from layertap.service.cli.extract import choose_format
from layertap.service.cli.options import ConfigOption, ModelOption
from layertap.service.cli.setup import create_configured_engine

if TYPE_CHECKING:
    from layertap.service.engine.engine import Engine
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.features import Features
    from layertap.service.pictures.sent import SentPicture

    Pictures = tuple[SentPicture | None, ...]

DEADLINE_S = 3600


def explain(
    image: Annotated[Path, typer.Argument(help="A picture.", exists=True, dir_okay=False, readable=False)],
    method: Annotated[str, typer.Option(help="A method of POST /explain, or several separated by commas.")],
    file: Annotated[
        Path, typer.Option("--out", help="A file, in the format that its suffix names: .png to look at, .npz, .json …")
    ],
    classes: Annotated[str | None, typer.Option(help="Numbers or top, separated by commas: a map of each.")] = None,
    layer: Annotated[str | None, typer.Option(help="The layer that Grad-CAM is of.")] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> None:
    """Write maps of what speaks for a model's answer to a picture, without a server; name the best classes."""
    reply_format = choose_format(file)
    given = {"method": method, "classes": classes, "layer": layer, "model": model}
    request = _make_request(image, {name: value for name, value in given.items() if value is not None})
    features, pictures = asyncio.run(_explain(create_configured_engine(config), request))
    from layertap.service.formats.reply_format import EncodeOptions

    buffers = reply_format.encode(features, EncodeOptions(sent=pictures))
    with file.open("wb") as stream:
        stream.writelines(buffers)
    for best in features.top_classes[0] if features.top_classes else ():
        name = f" {best.label}" if best.label is not None else ""
        stderr.print(f"class {best.number}{name}: {best.score:.4g}, {best.probability:.1%}", markup=False)
    stderr.print(f"{file}: {', '.join(features.arrays)}, fingerprint {features.fingerprint}", markup=False)
    for warning in features.warnings:
        stderr.print(warning, markup=False)


def _make_request(image: Path, given: dict[str, str]) -> ExtractRequest:
    """The request that a query with these parameters would make."""
    from layertap.service.engine.request import ExtractRequest
    from layertap.service.http.parsing import validate_body
    from layertap.service.http.query import Query
    from layertap.service.http.query_fields import read_fields
    from layertap.service.inputs.files import FileError, read_regular_file
    from layertap.service.inputs.items import ImageItem
    from layertap.service.schemas.bodies import ExplainBody

    query = Query.parse(urlencode(given).encode())
    body = validate_body(ExplainBody, read_fields(query, ExplainBody.model_fields.keys(), max_depth=1))
    try:
        picture = ImageItem(read_regular_file(image))
    except FileError as error:
        raise LayertapError(f"{image}: {error}") from None
    return ExtractRequest(model=body.model, items=((0, picture),), explanation=body.to_explanation())


async def _explain(engine: Engine, request: ExtractRequest) -> tuple[Features, Pictures]:
    """The maps, and the picture that they are of."""
    from layertap.service.engine.explanations import explain

    try:
        with engine.admission.admit(time.monotonic() + DEADLINE_S) as admission:
            features = await explain(engine, request, admission)
        return features, engine.list_pictures(request, features)
    finally:
        await engine.close()
