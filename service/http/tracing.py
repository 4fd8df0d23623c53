"""Traces by OpenTelemetry, an extra: a span for each request, with an event for each part of a step.

The events are added when the request has ended, from its timings.
"""

from __future__ import annotations

import asyncio
import os
import time
from threading import Thread
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import LayertapError, escape
from layertap.service.logs import MAX_PATH, make_fields
from layertap.service.timings import Timings
from layertap.service.version import get_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

HINT = 'pip install "layertap[otel]", or leave LAYERTAP_OTLP_ENDPOINT out'
CONTEXT = (b"traceparent", b"tracestate")
CLOSE_S = 3.0


def check_installed() -> None:
    """LayertapError if the extra is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.instrumentation.asgi
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise LayertapError("traces need OpenTelemetry, which is not installed", hint=HINT) from None


class RequestTracer:
    """Sends spans to a collector by OTLP over HTTP, in a thread of its own.

    ``endpoint`` is its address without a path: ``http://collector:4318``. OpenTelemetry's own variables (``OTEL_…``)
    set sampling, headers, resources and limits. LayertapError if the extra is missing.
    """

    def __init__(self, endpoint: str) -> None:
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        variables = OTELResourceDetector().detect().attributes  # else arguments of ``create`` come first
        resource = Resource.create({SERVICE_NAME: "layertap", SERVICE_VERSION: get_version(), **variables})
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self.provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))

    async def close(self) -> None:
        """Send what waits, for a limited time, and end."""
        thread = Thread(target=self.provider.shutdown, name="traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)


class TraceMiddleware:
    """Has OpenTelemetry's middleware make a span of each request, in its caller's trace if there is one.

    That middleware does not see the query and other headers, which it would record, and which break it if they are not
    text; nor the end of the reply, when it would end the span too early.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")  # attributes by their lasting names
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

        self._app = app
        # Without the spans that it would make of each piece.
        self._traced = OpenTelemetryMiddleware(
            self._pass_on, tracer_provider=tracer.provider, exclude_spans=["receive", "send"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, with its ``trace`` in the scope's ``state``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [field for field in scope["headers"] if field[0] in CONTEXT]
        shown = {"type": "http", "method": scope["method"], "path": escape(scope["path"], MAX_PATH)[1:-1]}
        await self._traced({**shown, "headers": headers, "whole": (scope, send)}, receive, send)

    async def _pass_on(self, shown: Scope, receive: Receive, send_head: Send) -> None:
        scope, send = shown["whole"]
        scope.setdefault("state", {})["trace"] = RequestTrace()

        async def send_piece(message: Message) -> None:
            await (send_head if message["type"] == "http.response.start" else send)(message)

        await self._app(scope, receive, send_piece)


class RequestTrace:
    """The span of a request; the reply and the log have its identifiers."""

    def __init__(self) -> None:
        from opentelemetry.trace import get_current_span

        self._span = get_current_span()
        context = self._span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def describe(self, timings: Timings, route: str) -> None:
        """Add the fields of the request's log line, and an event for each part of a step."""
        span, now, counter = self._span, time.time_ns(), time.perf_counter()
        if not span.is_recording():
            return
        fields: dict[str, Any] = make_fields(timings)
        span.update_name(f"{fields['method']} {route}")
        span.set_attribute("http.route", route)
        span.set_attributes({f"layertap.{name}": value for name, value in fields.items()})
        for step, started, ended, rows in timings.spans:
            attributes = {"layertap.ms": round((ended - started) * 1000, 3), "layertap.batch_rows": rows}
            span.add_event(step, attributes, now + round((started - counter) * 1e9))
