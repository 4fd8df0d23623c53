"""What FastAPI hands to the endpoints that declare it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError
from layertap.service.http.timeout import Timeout


async def get_engine(request: Request) -> Engine:
    """The app's engine. A coroutine: FastAPI would call a plain function in another thread."""
    engine: Engine = request.app.state.engine
    return engine


EngineDependency = Annotated[Engine, Depends(get_engine)]


async def limit_time(request: Request, engine: EngineDependency) -> AsyncIterator[float]:
    """Until when the endpoint may take, on the monotonic clock; RequestError.

    A DeadlineError that it raises says whose limit that was.
    """
    timeout = Timeout.parse(request.headers, engine.settings)
    try:
        yield timeout.deadline
    except DeadlineError as error:
        timeout.explain(error, otherwise="come again later")
        error.retry_after = engine.estimate_wait(request.path_params.get("name"))
        raise


DeadlineDependency = Annotated[float, Depends(limit_time)]
