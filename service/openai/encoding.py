"""Features as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from fastapi import Response
from numpy.typing import NDArray

from layertap.models.errors import Fault, RequestError
from layertap.models.fingerprint import digest_dimensions
from layertap.service.features import Features
from layertap.service.formats.buffers import Buffers, Encoding, view_bytes
from layertap.service.formats.json import write_json
from layertap.service.http.problems import MAX_DETAIL, Problem

Vector = NDArray[np.float32]


def encode_embeddings(features: Features, model_id: str, encoding: Encoding) -> Buffers:
    """Features with one result, a vector an input, as the JSON of a list of embeddings.

    Numbers are written so that reading them back into float32 gives the same bits; ``base64`` is of little-endian
    float32.
    """
    (vectors,) = features.arrays.values()
    write = WRITERS[encoding]
    body = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(vector)} for index, vector in enumerate(vectors)
        ],
        "model": model_id,
        "fingerprint": features.fingerprint,
        "usage": {"prompt_tokens": features.tokens, "total_tokens": features.tokens},
    }
    return write_json(body)


WRITERS: dict[Encoding, Callable[[Vector], Any]] = {
    "list": np.ascontiguousarray,
    "base64": lambda vector: view_bytes(np.ascontiguousarray(vector, "<f4")),
}


STATUS = {422: 400}  # all others are the same
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def encode_error(problem: Problem) -> Response:
    """A problem in OpenAI's envelope: of several reasons the first."""
    fault = problem.faults[0] if problem.faults else Fault(problem.detail, problem.hint)
    hint = fault.hint or problem.hint
    message = f"{fault.detail[:MAX_DETAIL]}; {hint[:MAX_DETAIL]}" if hint else fault.detail[:MAX_DETAIL]
    status = STATUS.get(problem.status, problem.status)
    error: dict[str, Any] = {
        "message": message,
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": _name_parameter(fault),
        "code": problem.kind,
    }
    return Response(orjson.dumps({"error": error}), status, problem.headers, "application/json")


def _name_parameter(fault: Fault) -> str | None:
    """The field of the body that a fault is about, as OpenAI writes it."""
    if fault.input is not None:
        return f"input[{fault.input}]"
    field, *rest = (fault.pointer or "/").split("/")[1:]
    return ("model" if rest and field == "layers" else field[:64]) or None  # layers are named behind the model's name


def check_dimensions(dimensions: int, columns: int, trained: Collection[int]) -> None:
    """RequestError unless vectors have so many numbers, or their model was ``trained`` for so many."""
    if dimensions == columns or (dimensions < columns and dimensions in trained):
        return
    known = ", ".join(map(str, sorted({*trained, columns})))
    raise RequestError(
        f"'dimensions' is {dimensions}, and this embedding has {known}",
        hint="leave it out; of a model that was trained for shorter vectors (Matryoshka) the configuration lists "
        "their lengths: 'dimensions: [64, 128, 256]'",
    )


def shorten(features: Features, dimensions: int) -> Features:
    """Features whose only result is (N, dimensions) float32, each row of length 1, or all zeros.

    A fingerprint of its own where that is fewer than the result had.
    """
    ((key, vectors),) = features.arrays.items()
    if dimensions == vectors.shape[1]:
        return features
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    shorter = shorter / np.where(lengths == 0, np.float32(1), lengths)
    return replace(features, arrays={key: shorter}, fingerprint=digest_dimensions(features.fingerprint, dimensions))
