"""Maps of ``POST /explain`` for a network of convolutions; attention is in ``networks``."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, multipart, noise, npy, picture, post, send, tensor

PNG = picture(1)
INPUTS = [image(PNG), image(picture(2))]
METHODS = ("grad_cam", "saliency", "attention_rollout", "gradient_rollout", "relevance")
BODIES: dict[str, Json] = {
    "grad_cam of a layer": {"method": "grad_cam", "layer": "block2"},
    "grad_cam of a call": {"method": "grad_cam", "layer": "block2.relu#0"},
    "grad_cam of a vector": {"method": "grad_cam", "layer": "head"},
    "grad_cam of two layers": {"method": "grad_cam", "layer": "block?"},
    "grad_cam of a class": {"method": "grad_cam", "objective": {"kind": "logit", "class": 7}},
    "grad_cam of a probability": {"method": "grad_cam", "objective": {"kind": "probability"}},
    "grad_cam of a layer's mean": {
        "method": "grad_cam",
        "layer": "block1",
        "objective": {"kind": "layer", "layer": "pool"},
    },
    "saliency of a class": {"method": "saliency", "objective": {"class": 2}},
    "saliency of a layer": {"method": "saliency", "layer": "block2"},
    "saliency as base64": {"method": "saliency", "encoding": "base64"},
    "saliency isolated": {"method": "saliency", "isolated": True},
    "rollout with an objective": {"method": "attention_rollout", "objective": {}},
    "discard_ratio for saliency": {"method": "saliency", "discard_ratio": 0.5},
    "discard_ratio of 1": {"method": "attention_rollout", "discard_ratio": 1},
    "unknown method": {"method": "lime"},
    "no method": {},
    "unknown layer": {"method": "grad_cam", "layer": "block9"},
    "unknown field": {"method": "saliency", "pool": "mean"},
    "layers": {"method": "saliency", "layers": ["pool"]},
    "bad inputs left out": {"method": "saliency", "on_error": "skip", "inputs": [{}, image(PNG)]},
    "bad inputs": {"method": "saliency", "inputs": [{}, image(PNG)]},
    "no inputs": {"method": "saliency", "inputs": []},
    "a tensor": {"method": "saliency", "inputs": [tensor(noise(3, 32, 32))]},
}


def requests() -> Iterator[Request]:
    """Two pictures each, to ``digits``."""
    for method in METHODS:
        yield post(f"explanations/{method}", {"method": method, "inputs": INPUTS}, "/explain")
    for name, document in BODIES.items():
        yield post(f"explanations/{name}", {"inputs": INPUTS} | document, "/explain")
    for format_ in ("json", "npy", "npz", "safetensors", "png"):
        query: Json = {"method": "grad_cam", "objective": "logit", "class": "3", "format": format_}
        yield send(f"explanations/query as {format_}", PNG, "image/png", "/explain", **query)
    accepted = {"accept": "image/png"}
    yield send("explanations/as a picture", PNG, "image/png", "/explain", accepted, method="saliency")
    yield send("explanations/dry run", PNG, "image/png", "/explain", method="saliency", dry_run="true")
    yield send("explanations/npy", npy(noise(2, 3, 32, 32)), "application/x-npy", "/explain", method="saliency")
    part = ("request", "application/json", json.dumps({"method": "grad_cam"}).encode())
    yield multipart("explanations/multipart", ("images", "image/png", PNG), part, path="/explain")
