"""A collector on loopback that takes OpenTelemetry's traces by HTTP, decoded with the protocol's own package."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What came: spans in their order, and what was said of who sent them."""

    url: str
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, object]] = field(default_factory=list)

    def find(self, request_id: str) -> Span | None:
        """The span of a request."""
        return next((span for span in self.spans if read(span).get("layertap.request_id") == request_id), None)


def read(holder: object) -> dict[str, object]:
    """The attributes of a span or a resource."""
    attributes = holder.attributes  # type: ignore[attr-defined]
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Collect until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            _keep(collector, self.path, self.headers, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _keep(collector: Collector, path: str, headers: Mapping[str, str], body: bytes) -> None:
    assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
    data = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
    for of_resource in ExportTraceServiceRequest.FromString(data).resource_spans:
        collector.resources.append(read(of_resource.resource))
        for of_scope in of_resource.scope_spans:
            collector.spans.extend(of_scope.spans)
