"""Parses bodies of reranking and of text-embeddings-inference into an ``ExtractRequest``, and encodes its features."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from fastapi import Response
from pydantic import BeforeValidator, ConfigDict, Field, StrictInt

from layertap.models.errors import RequestError
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.requested import Embedding
from layertap.models.spec import Truncate
from layertap.service.engine.request import ReplyOptions, SentInputs
from layertap.service.errors import UnsupportedMediaError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.json import write_json
from layertap.service.formats.sparse import SparseRows
from layertap.service.http.body import JSON, load_json
from layertap.service.http.problems import Problem
from layertap.service.http.receiving import MAX_KEPT, Envelope, write_rest
from layertap.service.inputs.items import TextItem
from layertap.service.openai.embeddings import MAX_INPUTS, AskedEmbeddings, describe_problem
from layertap.service.schemas.base import StrictBody, make_list
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings

LOGITS = ".[logits]"  # of transformers' classifiers
Texts = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_INPUTS)]


class Document(StrictBody):
    """A document as an object; other fields than its text are ignored."""

    model_config = ConfigDict(extra="ignore")

    text: str


class Body(StrictBody):
    """What all bodies have; the fields of other servers are ignored."""

    model_config = ConfigDict(extra="allow")  # so that a warning can name them

    field: ClassVar[str] = "inputs"  # that has the texts
    model: str | None = Field(None, max_length=512)  # None: the route's own or the default one

    def list_items(self) -> list[TextItem]:
        """A text or a pair for each input."""
        raise NotImplementedError

    def make_options(self) -> dict[str, Any]:
        """Fields of the request."""
        raise NotImplementedError


class RerankBody(Body):
    """``/rerank`` in the form of Jina, Cohere and infinity."""

    field = "documents"
    query: str
    documents: Annotated[tuple[str | Document, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: StrictInt | None = Field(None, ge=1)
    return_documents: bool | None = False
    raw_scores: bool = False

    def list_items(self) -> list[TextItem]:
        """The query beside each document."""
        return [TextItem(self.query, pair=each if isinstance(each, str) else each.text) for each in self.documents]

    def make_options(self) -> dict[str, Any]:
        """Its scores, and what the reply has of them."""
        options = {"raw_scores": self.raw_scores, "top_n": self.top_n, "with_texts": bool(self.return_documents)}
        return {"embedding": Embedding(layer=LOGITS), "is_of_pairs": True, **options}


class TeiBody(Body):
    """The fields that all bodies of text-embeddings-inference have."""

    truncate: bool | None = None
    truncation_direction: Annotated[
        Literal["left", "right"], BeforeValidator(lambda side: side.lower() if isinstance(side, str) else side)
    ] = "right"
    prompt_name: str | None = Field(None, max_length=512)

    def make_options(self) -> dict[str, Any]:
        """How a text that is too long is cut, and the prompt."""
        sides: dict[str, Truncate] = {"left": "start", "right": "end"}
        side = sides[self.truncation_direction] if self.truncate else None
        return {"truncate": "none" if self.truncate is False else side, "prompt": self.prompt_name}


class TeiRerankBody(TeiBody):
    """``/rerank`` in the form of text-embeddings-inference."""

    field = "texts"
    query: str
    texts: Texts
    return_text: bool = False
    raw_scores: bool = False

    def list_items(self) -> list[TextItem]:
        """The query beside each text."""
        return [TextItem(self.query, pair=each) for each in self.texts]

    def make_options(self) -> dict[str, Any]:
        """Its scores, and what the reply has of them."""
        options = {"raw_scores": self.raw_scores, "with_texts": self.return_text, "is_bare": True}
        return {"embedding": Embedding(layer=LOGITS), "is_of_pairs": True, **super().make_options(), **options}


class InputsBody(TeiBody):
    """Texts to embed."""

    inputs: Annotated[Texts, BeforeValidator(make_list)]

    def list_items(self) -> list[TextItem]:
        """A text for each input."""
        return list(map(TextItem, self.inputs))


class EmbedBody(InputsBody):
    """``/embed``."""

    normalize: bool = True
    dimensions: StrictInt | None = Field(None, ge=1)

    def make_options(self) -> dict[str, Any]:
        """The model's embedding."""
        options = {"embedding": Embedding(normalize=self.normalize), "dimensions": self.dimensions}
        return {**super().make_options(), **options}


class EmbedSparseBody(InputsBody):
    """``/embed_sparse``."""

    def make_options(self) -> dict[str, Any]:
        """The model's embedding as it is; its zeros are not sent."""
        return {**super().make_options(), "embedding": Embedding(), "reply": ReplyOptions()}


OWN = ("query", "documents", "texts", "inputs")  # the fields that differ from one request to the next


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedTexts(AskedEmbeddings):
    """An extraction of texts or pairs, with values for the reply."""

    field: str  # of the body, that has the texts
    is_of_pairs: bool = False  # whose scores are the reply
    raw_scores: bool = False
    top_n: int | None = None
    with_texts: bool = False
    is_bare: bool = False  # a list of ranks, as of text-embeddings-inference


_asked: LRUCache[Hashable, AskedTexts] = LRUCache(MAX_KEPT)  # clients ask the same over and over


def parse_texts(
    envelope: Envelope, data: bytes, settings: Settings, *, kind: type[Body], model: str | None
) -> tuple[AskedTexts, SentInputs]:
    """The request in a body of one ``kind``, and its inputs; ``model``: if the body names none; for a thread.

    BadRequestError, UnsupportedMediaError, RequestError.
    """
    if envelope.media_type != JSON:
        hint = "send Content-Type: application/json"
        raise UnsupportedMediaError("a body of this content type is not taken", hint=hint)
    value = load_json(data, settings.max_json_numbers)
    fields = value if isinstance(value, dict) else {}
    if kind is RerankBody and "texts" in fields:
        kind = TeiRerankBody
    body = validate(kind, value)
    rest = write_rest(fields, *OWN)
    key = kind, model, rest, settings.reply_limits
    if (asked := _asked.get(key)) is None:
        name = body.model if body.model is not None else model
        options: dict[str, Any] = {"reply": ReplyOptions(format=envelope.format, limits=settings.reply_limits)}
        asked = AskedTexts(
            model=name,
            model_id=name or "",
            modality="text",
            ignored=tuple(body.model_extra or ()),
            field=kind.field,
            **{"dimensions": None, **options, **body.make_options()},
        )
        if rest is not None:
            asked.remember()
            _asked.put(key, asked)
    return asked, SentInputs(tuple(enumerate(body.list_items())))


def encode_ranks(features: Features, asked: AskedTexts, sent: SentInputs, request_id: str) -> Buffers:
    """Scores of pairs, the best first: a list, or an object as Jina, Cohere and infinity have it."""
    (logits,) = features.arrays.values()
    raw = logits.reshape(-1).astype(np.float64)
    scores = (raw if asked.raw_scores else np.exp(-np.logaddexp(0, -raw))).astype(np.float32)  # else the sigmoid
    order = np.argsort(-raw, kind="stable")[: asked.top_n].tolist()
    if asked.is_bare:
        return write_json([_describe_rank(index, scores, asked, sent) for index in order])
    results = [_describe_result(index, scores, asked, sent) for index in order]
    body = {
        "id": request_id,
        "object": "rerank",
        "model": asked.model_id or features.model,
        "results": results,
        "fingerprint": features.fingerprint,
        "usage": {"prompt_tokens": features.tokens, "total_tokens": features.tokens},
    }
    return write_json(body)


def encode_vectors(features: Features) -> Buffers:
    """Vectors as a list of lists; RequestError if there are several for each text."""
    (vectors,) = features.arrays.values()
    if vectors.ndim != 2:
        detail = f"the embedding of model {features.model} is not one vector for each text"
        raise RequestError(detail, hint="ask POST /extract, which tells the tokens of each text")
    return write_json(np.ascontiguousarray(vectors, "<f4"))


def encode_sparse(features: Features, most: int) -> Buffers:
    """The entries of vectors that are not 0; RequestError if these are more than half of them.

    NotAcceptableError if they are no vectors, TooLargeError if they have more than ``most`` numbers.
    """
    ((key, vectors),) = features.arrays.items()
    rows = SparseRows.from_array(key, vectors)
    if 2 * len(rows.values) > vectors.size:
        detail = f"the embedding of model {features.model} is not sparse: most of its numbers are not 0"
        raise RequestError(detail, hint="ask POST /embed")
    rows.check_count(most)
    return write_json([_list_entries(**each) for each in rows.split()])


def encode_error(problem: Problem) -> Response:
    """A problem as text-embeddings-inference has it."""
    body = {"error": describe_problem(problem), "error_type": problem.kind}
    return Response(orjson.dumps(body), problem.status, problem.headers, "application/json")


def _list_entries(indices: Array, values: Array) -> list[dict[str, Any]]:
    return [{"index": index, "value": value} for index, value in zip(indices.tolist(), values, strict=True)]


def _get_text(index: int, sent: SentInputs) -> str:
    item = sent.items[index][1]
    return (item.pair or "") if isinstance(item, TextItem) else ""


def _describe_rank(index: int, scores: Array, asked: AskedTexts, sent: SentInputs) -> dict[str, Any]:
    text = {"text": _get_text(index, sent)} if asked.with_texts else {}
    return {"index": index, **text, "score": scores[index]}


def _describe_result(index: int, scores: Array, asked: AskedTexts, sent: SentInputs) -> dict[str, Any]:
    document = {"document": {"text": _get_text(index, sent)}} if asked.with_texts else {}
    return {"index": index, "relevance_score": scores[index], **document}
