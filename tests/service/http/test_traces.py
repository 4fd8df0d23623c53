"""Traces of an application that has ours in it name our routes, those too that pass over FastAPI's layers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI
from opentelemetry import trace

from layertap.service.app import create_app
from layertap.service.settings import Settings


class Span(trace.NonRecordingSpan):
    """One that keeps the name that it was given last."""

    def __init__(self, name: str) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name = name

    def is_recording(self) -> bool:
        """It is looked at."""
        return True

    def update_name(self, name: str) -> None:
        """Called once the route is known."""
        self.name = name


class Tracer(trace.NoOpTracer):
    """Keeps the spans that it has started."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, *_: Any, **__: Any) -> Span:
        """One more."""
        self.spans.append(Span(name))
        return self.spans[-1]


class TracerProvider(trace.TracerProvider):
    """Has one tracer."""

    def __init__(self) -> None:
        self.tracer = Tracer()

    def get_tracer(self, *_: Any, **__: Any) -> Tracer:
        """It."""
        return self.tracer


def test_names() -> None:
    provider = TracerProvider()
    outer = FastAPI(telemetry={"tracer_provider": provider})
    outer.mount("/features", create_app(Settings(workers=0, root_path="/features")))

    async def send() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://localhost") as client:
            return (await client.post("/features/extract", content=b"")).status_code

    assert asyncio.run(send()) >= 400
    assert "POST /features/extract" in [span.name for span in provider.tracer.spans]
