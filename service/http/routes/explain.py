"""``POST /explain``: maps of what speaks for an answer."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from layertap.service.engine.engine import Engine
from layertap.service.explain import explanations
from layertap.service.http.parsing import EndpointSpec, parse_request
from layertap.service.http.plain_route import PlainRoute
from layertap.service.http.request_handler import encode_response, receive
from layertap.service.schemas.bodies import ExplainBody

SPEC = EndpointSpec(
    ExplainBody,
    without_inputs="add some",
    without_dry_run="ask POST /extract?dry_run=true for the gradient",
)
parse = partial(parse_request, spec=SPEC)


async def explain(request: Request) -> Response:
    """Grad-CAM of a layer, attributions at the input, occlusion, attention rolled out, for each picture and class."""
    engine: Engine = request.app.state.engine
    async with receive(request, engine, parse) as (parsed, ticket):
        prepared = await explanations.prepare(engine, parsed, ticket)
        features = await explanations.explain(engine, prepared, ticket)
        return await encode_response(features, prepared, engine, ticket)


ROUTE = PlainRoute("/explain", explain)
