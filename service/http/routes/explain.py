"""``POST /explain``: maps of what speaks for an answer."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from layertap.service.explain import explanations
from layertap.service.explain.planned_work import WorkPlan
from layertap.service.http.dependencies import EngineDependency
from layertap.service.http.openapi import COMPUTED, describe_inputs
from layertap.service.http.parsing import parse_request
from layertap.service.http.request_handler import encode_response, receive
from layertap.service.schemas.bodies import ExplainBody
from layertap.service.schemas.examples import EXPLAIN
from layertap.service.schemas.replies import FeaturesReply

parse = partial(parse_request, kind=ExplainBody)
router = APIRouter(tags=["explain"])


@router.post(
    "/explain",
    summary="Maps of what speaks for a model's answer",
    response_model=FeaturesReply,
    responses=COMPUTED,
    openapi_extra=describe_inputs(ExplainBody, EXPLAIN),
)
async def explain(request: Request, engine: EngineDependency) -> Response:
    """Grad-CAM of a layer, attributions at the input, occlusion, attention rolled out, for each picture and class."""
    plan: WorkPlan = request.app.state.work_plan
    async with receive(request, engine, parse) as (parsed, ticket):
        prepared = await explanations.prepare(engine, parsed, ticket)
        features = await explanations.explain(engine, plan, prepared, ticket)
        return await encode_response(features, prepared, engine, ticket)
