"""A request and its reply on their way: counted, timed, with the headers that every reply has."""

from __future__ import annotations

import time

from starlette.types import Message, Receive, Scope, Send

from layertap.service.access_log import AccessRecord
from layertap.service.http.buffers_response import LARGE
from layertap.service.http.problems import describe_error
from layertap.service.http.tracing import RequestTrace
from layertap.service.timings import Timings

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),  # features of somebody's pictures
    (b"content-security-policy", b"frame-ancestors 'none'"),  # pages add what they need: a browser obeys both
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


class Exchange:
    """A request and its reply on their way: both are counted, and the reply gets the headers that are always there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, trace: RequestTrace | None) -> None:
        self.status = 0  # until a reply begins
        self._received_bytes = 0
        self._sent_bytes = 0
        self._receive_seconds = 0.0
        self._reply_begun = 0.0
        self._more_body = True
        self._trace = trace
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = time.perf_counter()

    def make_record(self, key: str) -> AccessRecord:
        """What there is to say once it has ended: with a key of that name."""
        state, now = self._scope["state"], time.perf_counter()
        return AccessRecord(
            request_id=state["request_id"],
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            seconds=now - self._begun,
            timings=state["timings"],
            client=(self._scope.get("client") or ("",))[0],
            key=key,
            request_bytes=self._received_bytes,
            reply_bytes=self._sent_bytes,
            receive_s=self._receive_seconds,
            send_s=now - self._reply_begun if self.status else 0.0,
            trace_id=self._trace.trace_id if self._trace is not None else "",
        )

    async def receive(self) -> Message:
        """The next piece of the request; once there is none, the end of the connection, which takes its time."""
        waits_for_body, started = self._more_body, time.perf_counter()
        message = await self._receive()
        self._more_body = message.get("more_body", False)
        self._received_bytes += len(message.get("body", b""))
        self._receive_seconds += time.perf_counter() - started if waits_for_body else 0.0
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._reply_begun = time.perf_counter()
            state = self._scope["state"]
            message["headers"] = [
                *message.get("headers", ()),  # nothing inside sets those that follow
                *make_context_headers(state["request_id"], self._format_timing(state["timings"])),
                *([(b"traceparent", self._trace.traceparent.encode())] if self._trace is not None else []),
            ]
        size = len(message.get("body", b""))
        if size > LARGE and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            message = {"type": message["type"]}  # uvicorn waits for the peer before it takes one more
        await self._send(message)
        self._sent_bytes += size if self._scope["method"] != "HEAD" else 0

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        state = self._scope["state"]
        response = state["encode_problem"](describe_error(error, state["request_id"]))
        if not self.status:
            await response(self._scope, self.receive, self.send)

    def _format_timing(self, timings: Timings) -> str:
        """The value of ``Server-Timing``."""
        entries = [f"{name};dur={milliseconds:.2f}" for name, milliseconds in timings.steps.items()]
        entries.append(f"total;dur={(time.perf_counter() - self._begun) * 1000:.2f}")
        entries += [f'{name};desc="{text}"' for name, text in timings.notes.items()]
        return ", ".join(entries)


def make_context_headers(request_id: str, timing: str) -> list[tuple[bytes, bytes]]:
    """The headers that every reply has, beside those of its body; ``timing`` is the value of ``Server-Timing``."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"server-timing", timing.encode("latin-1")),
        (b"vary", b"Accept, Accept-Encoding"),
        *SECURITY_HEADERS,
    ]
