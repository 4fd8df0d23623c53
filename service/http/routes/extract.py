"""``POST /extract``, ``/explain`` and ``/compare``: read, prepare, run, encode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Response

from layertap.models.catalog.catalog import BACKWARD_FACTOR
from layertap.service.engine.batch import Job
from layertap.service.engine.collect.joined_inputs import count_bytes, digest_jobs, join_changes, list_entries
from layertap.service.explain import comparing, explanations
from layertap.service.explain.prober import Prober, check_probed
from layertap.service.features import get_common
from layertap.service.formats.table import FORMATS
from layertap.service.http.application import ExchangeRoute
from layertap.service.http.exchange import ExchangeDependency
from layertap.service.http.openapi import COMPUTED, describe_inputs
from layertap.service.http.parsing import parse_request
from layertap.service.http.problems import format_fault
from layertap.service.http.receiving import make_envelope_reader, receive
from layertap.service.http.reply import describe_skipped, describe_warnings, encode_response
from layertap.service.schemas.bodies import CompareBody, ExplainBody, ExtractBody
from layertap.service.schemas.examples import COMPARE, EXPLAIN, EXTRACT
from layertap.service.schemas.replies import ComparisonReply, DryRunReply, FeaturesReply

parse_extract = partial(parse_request, kind=ExtractBody)
parse_explain = partial(parse_request, kind=ExplainBody)
parse_compare = partial(parse_request, kind=CompareBody)
read_for_json = make_envelope_reader({"json": FORMATS["json"]})
router = APIRouter()
described = APIRouter()  # of the plain route, for its schema only


@described.post(
    "/extract",
    tags=["extract"],
    summary="Values of a model's layers for your inputs",
    response_model=FeaturesReply | DryRunReply,
    responses=COMPUTED,
    openapi_extra=describe_inputs(ExtractBody, EXTRACT, dry_run={"type": "boolean"}),
)
async def extract(exchange: ExchangeDependency) -> Response:
    """Name layers, send inputs, get what these layers take or return, raw or pooled."""
    engine = exchange.engine
    (asked, sent), ticket = await receive(exchange, parse_extract)
    if asked.dry_run:
        handle = await engine.get_handle(asked.model, ticket)
        return await engine.dry_run(asked, sent, ticket, partial(_make_estimate, warnings=handle.model.warnings))
    if asked.probe:
        check_probed(asked)
    if asked.reply.format.is_picture:
        sent = await engine.fetch(asked, sent, ticket)
    features = await engine.extract(asked, sent, ticket)
    if asked.probe:
        prober: Prober = exchange.scope["app"].state.prober
        features = await prober.add_probes(features, asked, sent, ticket)
    return await encode_response(features, asked, sent, engine, ticket)


routes = [ExchangeRoute("/extract", extract, methods=["POST"])]


@router.post(
    "/explain",
    tags=["explain"],
    summary="Maps of the pixels that support a class",
    response_model=FeaturesReply,
    responses=COMPUTED,
    openapi_extra=describe_inputs(ExplainBody, EXPLAIN),
)
async def explain(exchange: ExchangeDependency) -> Response:
    """Grad-CAM of a layer, attributions at the input, occlusion, attention rollout, for each picture and class."""
    engine = exchange.engine
    (asked, sent), ticket = await receive(exchange, parse_explain)
    sent = await explanations.prepare(engine, asked, sent, ticket)
    features = await explanations.explain(engine, asked, sent, ticket)
    return await encode_response(features, asked, sent, engine, ticket)


@router.post(
    "/compare",
    tags=["extract"],
    summary="How alike layers, of one model or of two, place the same inputs",
    response_model=ComparisonReply,
    responses={status: each for status, each in COMPUTED.items() if status != 200},
    openapi_extra=describe_inputs(CompareBody, COMPARE),
)
async def compare(exchange: ExchangeDependency) -> Response:
    """Linear CKA, representational similarity, Procrustes distances, Gram matrices and HSIC."""
    engine = exchange.engine
    (asked, sent), ticket = await receive(exchange, parse_compare, read_for_json)
    reply = await comparing.compare(engine, asked, sent, ticket)
    encode = partial(orjson.dumps, reply, option=orjson.OPT_SERIALIZE_NUMPY)
    body = await engine.run_in_thread(encode, ticket.deadline)
    headers = {"X-Layertap-Fingerprint": reply["fingerprint"]} | describe_warnings(reply.get("warnings", ()))
    return Response(body, media_type="application/json", headers=headers)


def _make_estimate(jobs: Sequence[Job], warnings: Sequence[str]) -> Response:
    """The reply of a dry run: shapes and costs without a forward; ``warnings`` are those of the model."""
    job = max(jobs, key=lambda job: job.plan.cost)
    fingerprint, changes = digest_jobs(jobs), join_changes(each.prepared.changed for each in jobs)
    space = get_common(space for each in jobs for space in each.prepared.spaces.values())
    per_forward = job.prepared.rows_per_forward
    features: dict[str, Any] = {}
    for name, result, rows in list_entries(jobs):
        shape, dtype = result.capture.reply_shape(rows), result.capture.dtype
        features[name] = {"shape": shape, "dtype": dtype, "bytes": count_bytes(result, rows)}
    body: dict[str, Any] = {
        "model": job.prepared.key.name,
        "fingerprint": fingerprint,
        **({"space": space} if space else {}),
        "rows": sum(each.rows for each in jobs),
        "features": features,
        "bytes": sum(each.plan.nbytes(each.rows) for each in jobs),
        "stops_at": job.plan.stops_at.text,
        **({"interventions": changes} if changes else {}),
        **({"rows_per_forward": per_forward} if per_forward is not None else {}),
        "cost": job.plan.cost,
        "seconds": round(sum(_estimate_seconds(each) for each in jobs), 6),
        "warnings": [*warnings, *dict.fromkeys(warning for each in jobs for warning in _list_warnings(each))],
        "errors": [format_fault(fault) for fault in job.faults],
    }
    headers = {"X-Layertap-Fingerprint": fingerprint} | describe_skipped(job.faults)
    return Response(orjson.dumps(body), media_type="application/json", headers=headers)


def _estimate_seconds(job: Job) -> float:
    seconds = job.plan.cost * job.prepared.catalog.seconds * job.rows
    return seconds if job.plan.objective is None else BACKWARD_FACTOR * seconds


def _list_warnings(job: Job) -> list[str]:
    warnings = [*job.plan.warnings]
    if job.plan.skipped:
        names = ", ".join(job.plan.skipped[:10]) + (" …" if len(job.plan.skipped) > 10 else "")
        warnings.append(f"{len(job.plan.skipped)} matching layers never run in a forward and are left out: {names}")
    if job.prepared.rows_per_forward == 1 and job.prepared.catalog.traits.deterministic:
        what = "rows of this model" if job.prepared.catalog.crosses_rows else "rows of a layer"
        can_batch = job.prepared.catalog.crosses_rows and job.prepared.catalog.batches
        batch = '; "isolated": true makes one batch of them' if can_batch else ""
        warnings.append(f"{what} affect each other, or it takes one at a time: each input runs alone{batch}")
    return warnings
