"""``POST /explain``: maps of what speaks for an answer."""

from __future__ import annotations

from fastapi import Request, Response

from layertap.service.engine import explanations
from layertap.service.engine.engine import Engine
from layertap.service.http.parsing import COMMON, EndpointSpec
from layertap.service.http.plain_route import PlainRoute
from layertap.service.http.request_handler import encode_response, receive
from layertap.service.schemas.bodies import ExplainBody

SPEC = EndpointSpec(
    ExplainBody,
    COMMON | {"method", "layer", "discard_ratio"},
    without_inputs="add some",
    without_dry_run="ask POST /extract?dry_run=true for the gradient",
)


async def explain(request: Request) -> Response:
    """Grad-CAM of a layer, saliency at the input, or attention rolled out, for each picture."""
    engine: Engine = request.app.state.engine
    async with receive(request, engine, SPEC) as (parsed, admission):
        features = await explanations.explain(engine, parsed, admission)
        return await encode_response(features, parsed, engine, admission.deadline)


ROUTE = PlainRoute("/explain", explain)
