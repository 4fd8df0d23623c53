"""What watches a server reads: ``/livez``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from layertap.models.registry import ModelEntry
from layertap.service.engine.models.model_handle import FAILED_RETRY_S
from layertap.service.errors import UnavailableError
from layertap.service.http.openapi import describe_problems
from layertap.service.http.timeout import EngineDependency
from layertap.service.metrics import CONTENT_TYPE
from layertap.service.schemas.replies import HealthReply

router = APIRouter(tags=["health"], responses=describe_problems(503))


@router.get("/livez", response_model=HealthReply)
async def livez(engine: EngineDependency) -> Response:
    """Whether the process works: 503 once it can't go on and is about to end."""
    if not engine.manager.alive:
        raise _permanent_failure_error()
    return JSONResponse({"status": "alive"})


@router.get("/readyz", response_model=HealthReply)
async def readyz(engine: EngineDependency) -> Response:
    """Whether requests are welcome: 503 until the models of the start are loaded, if one failed, while draining.

    Also while no model can answer. A setting says which failures matter; ``failed`` lists the kinds of the others.
    """
    if not engine.manager.alive:
        raise _permanent_failure_error()
    if not engine.manager.ready:
        waits = (max(each.seconds_to_load, engine.estimate_wait(each.name)) for each in engine.manager.list_handles())
        detail = "models are loading or the server is shutting down"
        raise UnavailableError(detail, retry_after=max(waits, default=0.0))
    failures = engine.manager.load_failures
    if failures or not engine.manager.can_answer:
        # No reason and no name: whoever asks here has no key.
        kinds = f"{len(failures)} of the models wanted from the start failed: {', '.join(_list_kinds(failures))}"
        detail = kinds if failures else "no model can answer"
        raise UnavailableError(detail, hint="GET /models has the reasons", retry_after=FAILED_RETRY_S)
    failed = _list_kinds(engine.manager.failures)
    return JSONResponse({"status": "ready", **({"failed": failed} if failed else {})})


@router.get("/metrics", include_in_schema=False)  # its readers take no JSON
def render_metrics(engine: EngineDependency) -> Response:  # not async: walks through all models for milliseconds
    """Every figure of this server in Prometheus' text format."""
    return Response(engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _list_kinds(failures: Sequence[ModelEntry]) -> list[str]:
    return list(dict.fromkeys(entry.kind for entry in failures))


def _permanent_failure_error() -> UnavailableError:
    return UnavailableError(
        "a device, a model or a thread has failed for good; the server has to be restarted",
        hint="whoever runs the server restarts it; its log has the reason",
        retry_after=5.0,
    )
