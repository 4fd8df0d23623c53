"""Features as OpenAI's clients read them."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from layertap.service.features import Features
from layertap.service.formats.reply_format import Encoding

Vector = NDArray[np.float32]


def encode_embeddings(features: Features, model_id: str, encoding: Encoding) -> bytes:
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
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _write_base64(vector: Vector) -> str:
    return b2a_base64(vector.astype("<f4").tobytes(), newline=False).decode()


WRITERS: dict[Encoding, Callable[[Vector], Any]] = {"list": np.ascontiguousarray, "base64": _write_base64}
