"""What FastAPI hands to the endpoints that declare it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from layertap.service.engine.engine import Engine


async def get_engine(request: Request) -> Engine:
    """The app's engine. A coroutine: FastAPI would call a plain function in another thread."""
    engine: Engine = request.app.state.engine
    return engine


EngineDependency = Annotated[Engine, Depends(get_engine)]
