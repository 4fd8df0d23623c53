"""Texts and tokens for a BERT of random weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.recorded.request import Json, Request, noise, npy, picture, post, safetensors_of, send, tensor, tensors

TEXT = "a cat sat on the mat"
TOKENS = [2, 4, 5, 7, 8, 9, 10, 3]
IDS = np.array(TOKENS, np.int64)
MASK = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.int64)
ONE: list[Json] = [{"text": TEXT}]
SEVERAL: list[Json] = [{"text": TEXT}, {"text": "the red dog"}, {"tokens": TOKENS}]
LAYER = "bert.encoder.layer.1"
INPUTS: dict[str, list[Json]] = {
    "one": ONE,
    "several": SEVERAL,
    "tokens": [{"tokens": TOKENS}],
    "unknown words": [{"text": "xylophones everywhere"}],
    "empty": [{"text": ""}],
    "too long": [{"text": "a cat " * 30}],
    "far too long": [{"text": "a cat " * 3000}],
    "tokens too long": [{"tokens": [4] * 41}],
    "tokens beyond": [{"tokens": [4, 20]}],
    "a tensor of ids": [tensor(IDS)],
    "ids and a mask": [tensors(input_ids=IDS, attention_mask=MASK)],
    "a mask with a hole": [tensors(input_ids=IDS, attention_mask=MASK[::-1].copy())],
    "a picture": [{"image": "QUJD"}],
    "one bad": [{"text": TEXT}, {"text": "a " * 50}],
}
REQUESTS: dict[str, Json] = {
    **{f"pool {pool}": {"layers": [LAYER], "pool": pool} for pool in ("none", "mean", "mean_all", "max", "gem", "cls")},
    "flattened": {"layers": [LAYER], "pool": "flatten", "inputs": ONE},
    "int8": {"layers": [LAYER], "dtype": "int8"},
    "scores": {"layers": [".", "classifier"]},
    "statistics": {"layers": [{"layer": "bert.encoder.layer.*", "stats": True}]},
    "tokens": {"layers": [{"layer": LAYER, "tokens": [0, 3]}]},
    "a token that one has not": {"layers": [{"layer": LAYER, "tokens": [7]}]},
    "mask": {"layers": [".[attention_mask]:input", ".[input_ids]:input"]},
    "attention": {"layers": ["bert.encoder.layer.0.attention.self:attention"]},
    "gradient": {"layers": [f"{LAYER}:grad_output"], "objective": {"class": 1}, "pool": "mean"},
    "zeroed token": {
        "layers": ["classifier"],
        "interventions": [{"layer": "bert.embeddings", "op": "zero", "tokens": [1]}],
    },
    "noise": {"layers": ["classifier"], "interventions": [{"layer": "bert.embeddings", "op": "noise", "std": 0.5}]},
    "tensor of one length": {
        "layers": ["classifier"],
        "inputs": ONE,
        "interventions": [{"layer": "bert.embeddings", "op": "add", "tensor": tensor(noise(8, 32))["tensor"]}],
    },
    "verified": {"layers": [LAYER], "pool": "mean", "verify": True},
    "isolated": {"layers": [LAYER], "pool": "mean", "isolated": True},
    "resumed": {"layers": ["classifier"], "resume": LAYER, "inputs": [tensor(noise(6, 32))]},
    "dry": {"layers": [LAYER], "inputs": []},
}


def requests() -> Iterator[Request]:
    """To ``bert``."""
    query: Json = {"model": "bert", "layers": LAYER, "pool": "mean"}
    for name, inputs in INPUTS.items():
        document = {"model": "bert", "layers": [LAYER], "pool": "mean", "inputs": inputs}
        yield post(f"texts/inputs {name}", document)
        yield post(
            f"texts/inputs skipped {name}", document | {"on_error": "skip", "inputs": [*inputs, {"text": "the mat"}]}
        )
    for name, fields in REQUESTS.items():
        dry = {"dry_run": "true"} if name == "dry" else None
        yield post(f"texts/{name}", {"model": "bert", "inputs": SEVERAL} | fields, query=dry)
    yield post("texts/embedding", {"model": "bert", "inputs": SEVERAL})
    yield post("texts/every layer", {"model": "bert", "inputs": SEVERAL, "layers": [{"layer": "*", "stats": ["mean"]}]})
    yield post("texts/explained", {"model": "bert", "method": "saliency", "inputs": SEVERAL}, "/explain")
    yield send("texts/raw", TEXT.encode(), "text/plain", **query)
    yield send("texts/raw with a charset", TEXT.encode(), "text/plain; charset=utf-8", **query)
    yield send("texts/npy", npy(IDS), "application/x-npy", **query)
    arrays = safetensors_of(input_ids=IDS, attention_mask=MASK)
    yield send("texts/safetensors", arrays, "application/x-safetensors", **query)
    yield send("texts/png", picture(1), "image/png", **query)
