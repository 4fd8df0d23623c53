"""``POST /explain``: maps of what speaks for an answer."""

from __future__ import annotations

from typing import cast

from fastapi import Request, Response

from layertap.models.errors import RequestError
from layertap.service.engine.engine import Engine
from layertap.service.engine.explain import explain as explained
from layertap.service.http.parsing import COMMON, EndpointSpec
from layertap.service.http.plain_route import PlainRoute
from layertap.service.http.request_handler import ParsedRequest, encode_response, handle_request
from layertap.service.schemas.bodies import ExplainBody

DIALECT = EndpointSpec(ExplainBody, COMMON | {"method", "layer", "discard_ratio"}, "add some")


async def explain(request: Request) -> Response:
    """Grad-CAM of a layer, saliency at the input, or attention rolled out, for each picture."""
    engine: Engine = request.app.state.engine

    async def cook(order: ParsedRequest) -> Response:
        if order.wish.dry:
            raise RequestError("an explanation has no dry run", hint="ask POST /extract?dry_run=true for the gradient")
        wanted = cast("ExplainBody", order.body).to_explanation()
        return await encode_response(engine, await explained(engine, order.ask, wanted, order.fits), order)

    return await handle_request(request, DIALECT, cook)


ROUTE = PlainRoute("/explain", explain, methods=["POST"])
