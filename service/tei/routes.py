"""``/rerank``, also below ``/v1``, ``/embed`` and ``/embed_sparse``: plain routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from starlette.responses import Response

from layertap.models.errors import Fault, LayertapError, RequestError, escape
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.request import SentInputs
from layertap.service.features import Features
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.table import FORMATS
from layertap.service.http.application import ExchangeRoute
from layertap.service.http.exchange import Exchange
from layertap.service.http.receiving import make_envelope_reader, receive
from layertap.service.http.reply import BuffersResponse, describe_features, run_encoder
from layertap.service.openai.routes import compute_vectors, join_vectors
from layertap.service.tei import bodies

JSON = replace(FORMATS["json"], instead="send fewer inputs")
NO_RERANKER = (
    "name a classifier of texts with a single label: transformers' …ForSequenceClassification, or a CrossEncoder"
)
read_envelope = make_envelope_reader({JSON.name: JSON})


async def rerank(exchange: Exchange) -> Response:
    """The documents that fit a query best."""

    def encode(features: Features, asked: bodies.AskedTexts, sent: SentInputs) -> Buffers:
        return bodies.encode_ranks(features, asked, sent, exchange.facts.request_id)

    return await _answer(exchange, "rerank", bodies.RerankBody, encode)


async def embed(exchange: Exchange) -> Response:
    """A vector for each text."""
    return await _answer(exchange, "embed", bodies.EmbedBody, lambda features, *_: bodies.encode_vectors(features))


async def embed_sparse(exchange: Exchange) -> Response:
    """The entries of a sparse vector for each text."""
    most = exchange.engine.settings.max_json_numbers

    def encode(features: Features, *_: object) -> Buffers:
        return bodies.encode_sparse(features, most)

    return await _answer(exchange, "embed_sparse", bodies.EmbedSparseBody, encode)


routes = [
    *(ExchangeRoute(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank")),
    ExchangeRoute("/embed", embed, methods=["POST"]),
    ExchangeRoute("/embed_sparse", embed_sparse, methods=["POST"]),
]


async def _answer(
    exchange: Exchange,
    name: str,
    kind: type[bodies.Body],
    encode: Callable[[Features, bodies.AskedTexts, SentInputs], Buffers],
) -> Response:
    """The reply to a body that may name no model: then the one called as the route answers, or the default one."""
    engine = exchange.engine
    registry = engine.manager.registry
    model = name if name in registry.aliases or name in registry else None
    parse = partial(bodies.parse_texts, kind=kind, model=model)
    (asked, sent), ticket = await receive(exchange, parse, read_envelope)
    try:
        if asked.is_of_pairs:
            _check_reranker((await engine.get_handle(asked.model, ticket)).model)
        features = await compute_vectors(engine, asked, sent, ticket)

        def write() -> tuple[Features, Buffers]:
            joined = join_vectors(features, asked, asked.field)
            return joined, encode(joined, asked, sent)

        joined, data = await run_encoder(write, features[0], engine, ticket, in_thread=len(features) > 1)
    except LayertapError as error:
        raise _locate(error, asked.field) from None
    return BuffersResponse(data, describe_features(joined), "application/json")


def _check_reranker(model: ModelInfo) -> None:
    """RequestError unless a model gives one score for a pair of texts."""
    scores = [info.shape for info in model.catalog.outputs if info.path == ("logits",)]
    if model.text is None or model.text.encode_pair is None or scores != [(1, 1)]:
        detail = f"model {escape(model.spec.name)} does not give one score for a pair of texts"
        raise RequestError.from_faults([Fault(detail, NO_RERANKER, "/model")])


def _locate(error: LayertapError, field: str) -> LayertapError:
    """An error whose faults name the body's own fields."""
    error.faults = tuple(
        replace(fault, pointer=f"/{field}/{fault.input}", input=None) if fault.input is not None else fault
        for fault in error.faults
    )
    return error
