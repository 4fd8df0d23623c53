"""What routes that compute have in common: a request that arrives, and features as a reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from layertap.models.errors import Fault
from layertap.service.engine.admission import Admission
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, Timings
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.features import Features, list_skipped
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.table import FORMATS
from layertap.service.http.body import read_body
from layertap.service.http.disconnect import cancel_on_disconnect
from layertap.service.http.parsing import EndpointSpec, RawRequest, parse_request
from layertap.service.http.query import Query
from layertap.service.http.timeout import Timeout

SHORT = 2048  # bytes
FEW_NUMBERS = 4096


@asynccontextmanager
async def receive(
    request: Request, engine: Engine, spec: EndpointSpec
) -> AsyncIterator[tuple[ExtractRequest, Admission]]:
    """A request that has arrived, parsed, and its place in the server.

    The block is cancelled where the client goes away (ClientGoneError); what it raises for want of time says how much
    there was. The place is given back once the reply is sent. Any error of the tree.
    """
    state = request.scope["state"]
    query = Query.parse(request.scope["query_string"])
    reply_format = negotiate(request.headers.get("accept"), query.get_one("format"), FORMATS)
    dry_run = query.get_flag("dry_run")
    timeout = Timeout.parse(request.headers, engine.settings)
    admission = state["until_sent"].enter_context(engine.admission.admit(timeout.deadline))
    data = await read_body(request, engine.settings, admission.reserve_bytes)
    timings = Timings(state["timings"], state["notes"])
    raw = RawRequest(request.headers, query, data, spec, reply_format, dry_run, timings)
    model = None
    async with cancel_on_disconnect(request):
        try:
            parsed = await _parse(raw, engine, timeout.deadline)
            model = parsed.model
            yield parsed, admission
        except QueueTooLongError as error:
            timeout.explain(error)
            raise
        except DeadlineError as error:
            timeout.explain(error)
            error.retry_after = engine.estimate_wait(model)
            raise


async def encode_response(features: Features, request: ExtractRequest, engine: Engine, deadline: float) -> Response:
    """Features as a reply."""
    reply = request.reply
    with request.timings.step("encode"):
        encode = partial(reply.format.encode, features, reply.encoding)
        if sum(array.size for array in features.arrays.values()) <= FEW_NUMBERS:
            data = encode()
        else:
            data = await engine.run_in_thread(encode, deadline)
    headers = make_headers(features.fingerprint, features.errors)
    if features.verified:
        headers["X-Layertap-Verified"] = "true"
    if features.warnings:
        warnings = "; ".join(features.warnings)
        headers["X-Layertap-Warnings"] = warnings.encode("ascii", "replace").decode()  # a name that is cut ends in "…"
    return Response(data, media_type=reply.format.media_type, headers=headers)


def make_headers(fingerprint: str, faults: Sequence[Fault]) -> dict[str, str]:
    """What the head of every good reply says: the fingerprint, and which inputs were left out, where some were."""
    places = ",".join(map(str, list_skipped(faults)))
    return {"X-Layertap-Fingerprint": fingerprint, **({"X-Layertap-Skipped": places} if places else {})}


async def _parse(raw: RawRequest, engine: Engine, deadline: float) -> ExtractRequest:
    with raw.timings.step("parse"):
        parse = partial(parse_request, raw, engine.settings)
        return parse() if _is_short(raw) else await engine.run_in_thread(parse, deadline)


def _is_short(raw: RawRequest) -> bool:
    """Whether reading takes less time than a way to another thread and back: a lone picture is only looked at later."""
    media_type = raw.media_type
    short = media_type.startswith("image/") or (len(raw.data) <= SHORT and media_type != "multipart/form-data")
    return short and len(raw.query.text) <= SHORT
