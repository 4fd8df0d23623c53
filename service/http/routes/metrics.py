"""``GET /metrics`` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from layertap.service.http.dependencies import EngineDependency
from layertap.service.metrics import CONTENT_TYPE

router = APIRouter()


# Not in the OpenAPI document: who reads it calls with JSON, and a scraper reads none.
# docs/reference/metrics.md has every name.
# Not async: rendering takes milliseconds, and counting hooks walks through every loaded model. A thread does that.
@router.get("/metrics", include_in_schema=False)
def render_metrics(engine: EngineDependency) -> Response:
    """Every figure of this server in Prometheus' text format."""
    return Response(engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
