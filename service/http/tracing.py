"""Traces for OpenTelemetry: of each request a span, and one for each part of a step. Its packages are an extra.

The spans of steps are made once the request has ended, of the times that its road noted, in worker processes too: on
the road nothing of OpenTelemetry runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING

from layertap.models.errors import LayertapError, escape
from layertap.service.logs import MAX_METHOD, MAX_NAME, MAX_PATH
from layertap.service.timings import RequestFacts, Timings
from layertap.service.version import get_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

HINT = 'pip install "layertap[otel]", or leave LAYERTAP_OTLP_ENDPOINT out'
SERVER_ERROR = 500
CLOSE_S = 3.0
Attributes = dict[str, str | int]


def check_installed() -> None:
    """LayertapError where the extra is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise LayertapError("traces need OpenTelemetry, which is not installed", hint=HINT) from None


class RequestTracer:
    """Sends spans to a collector by OTLP over HTTP, in a thread of its own.

    ``endpoint`` is its address without a path: ``http://collector:4318``. What OpenTelemetry's own variables
    (``OTEL_…``) say of sampling, headers, resources and limits holds. LayertapError where the extra is missing.
    """

    def __init__(self, endpoint: str) -> None:
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        variables = OTELResourceDetector().detect().attributes  # what is given to ``create`` comes before them
        resource = Resource.create({SERVICE_NAME: "layertap", SERVICE_VERSION: get_version(), **variables})
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("layertap", get_version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, head: Mapping[bytes, bytes]) -> RequestTrace:
        """The span of a request whose head has come, in its caller's trace where ``traceparent`` names one."""
        from opentelemetry.trace import SpanKind

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.items()}
        parent = self._propagator.extract(carrier)
        return RequestTrace(self._tracer, self._tracer.start_span("request", parent, SpanKind.SERVER))

    async def close(self) -> None:
        """Send what waits, and end; a collector that does not answer is not waited for long."""
        thread = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)


class RequestTrace:
    """The span of one request, whose identifiers its reply and its line in the log have."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self._tracer = tracer
        self._span = span

    def end(self, timings: Timings, route: str) -> None:
        """The request has ended: name its span, and add those of its steps."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        span, facts, now, counter = self._span, timings.facts, time.time_ns(), time.perf_counter()
        if span.is_recording():
            span.update_name(f"{escape(facts.method, MAX_METHOD)[1:-1]} {route}")
            span.set_attributes(dict(_list_attributes(facts, route)))
            if facts.status >= SERVER_ERROR or not facts.status:
                span.set_status(StatusCode.ERROR)
            context = set_span_in_context(span)
            for step, started, ended, rows in timings.spans:
                started_ns, ended_ns = (now + round((moment - counter) * 1e9) for moment in (started, ended))
                attributes: Attributes = {"layertap.batch_rows": rows} if rows else {}
                part = self._tracer.start_span(step, context, attributes=attributes, start_time=started_ns)
                part.end(ended_ns)
        span.end(now)


def _list_attributes(facts: RequestFacts, route: str) -> Iterator[tuple[str, str | int]]:
    """By OpenTelemetry's conventions for HTTP where it has some; what is not known of a request is left out."""
    attributes: Attributes = {
        "http.request.method": escape(facts.method, MAX_METHOD)[1:-1],
        "http.route": route,
        "http.response.status_code": facts.status,
        "url.path": escape(facts.path, MAX_PATH)[1:-1],
        "http.request.body.size": facts.request_bytes,
        "http.response.body.size": facts.reply_bytes,
        "layertap.request_id": facts.request_id,
        "layertap.key": facts.key,
        "layertap.model": escape(facts.model, MAX_NAME)[1:-1],
        "layertap.layers": facts.layers,
        "layertap.selectors": facts.selectors,
        "layertap.rows": facts.rows,
        "layertap.batch_rows": facts.batch_rows,
        "error.type": str(facts.status) if facts.status >= SERVER_ERROR else "",
    }
    return ((name, value) for name, value in attributes.items() if value)
