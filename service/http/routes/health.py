"""``/livez``, ``/readyz`` and ``/metrics``: for supervisors, balancers and Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from layertap.models.registry import ModelEntry
from layertap.service.engine.engine import Engine
from layertap.service.engine.models.model_handle import FAILED_RETRY_S
from layertap.service.errors import UnavailableError
from layertap.service.http.exchange import ExchangeDependency
from layertap.service.http.openapi import describe_problems
from layertap.service.metrics import CONTENT_TYPE
from layertap.service.schemas.replies import HealthReply

router = APIRouter(tags=["health"], responses=describe_problems(503))


@router.get("/livez", response_model=HealthReply)
async def livez(exchange: ExchangeDependency) -> Response:
    """Whether the process works: 503 if it can't go on and is about to end."""
    check_live(exchange.engine)
    return JSONResponse({"status": "alive"})


@router.get("/readyz", response_model=HealthReply)
async def readyz(exchange: ExchangeDependency) -> Response:
    """Whether to send requests: 503 until the models of the start are loaded, if one failed, or none can answer.

    Also 503 while draining. A setting says which failures matter; ``failed`` lists the kinds of the others.
    """
    failed = check_ready(exchange.engine)
    return JSONResponse({"status": "ready", **({"failed": failed} if failed else {})})


@router.get("/metrics", include_in_schema=False)  # its readers take no JSON
def render_metrics(exchange: ExchangeDependency) -> Response:  # not async: goes through all models for milliseconds
    """All metrics of this server in Prometheus' text format."""
    return Response(exchange.engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def check_live(engine: Engine) -> None:
    """UnavailableError if the process can't go on."""
    if not engine.manager.alive:
        detail = "a device, a model or a thread has failed for good; the server has to be restarted"
        raise UnavailableError(detail, hint="its log has the reason; supervisors restart it", retry_after=5.0)


def check_ready(engine: Engine) -> list[str]:
    """UnavailableError unless requests are welcome; the kinds of failures that do not matter."""
    check_live(engine)
    manager = engine.manager
    if not manager.ready:
        waits = (max(each.seconds_to_load, engine.estimate_wait(each.name)) for each in manager.list_handles())
        detail = "models are loading or the server is shutting down"
        raise UnavailableError(detail, retry_after=max(waits, default=0.0))
    if manager.load_failures or not manager.can_answer:
        # Without reasons and names, because this needs no key.
        kinds = ", ".join(_list_kinds(manager.load_failures))
        detail = f"{len(manager.load_failures)} of the models wanted from the start failed: {kinds}"
        detail = detail if kinds else "no model can answer"
        raise UnavailableError(detail, hint="GET /models has the reasons", retry_after=FAILED_RETRY_S)
    return _list_kinds(manager.failures)


def _list_kinds(failures: Sequence[ModelEntry]) -> list[str]:
    return list(dict.fromkeys(entry.kind for entry in failures))
