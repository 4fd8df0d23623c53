"""Every objective, and gradients at both sites."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, picture, post, send

PNG = picture(1)
INPUTS = [image(PNG), image(picture(2))]
OBJECTIVES: dict[str, Json] = {
    "default": {},
    "logit": {"kind": "logit", "class": 3},
    "top logit": {"kind": "logit", "class": "top"},
    "probability": {"kind": "probability", "class": 3},
    "top probability": {"kind": "probability"},
    "cross entropy": {"kind": "cross_entropy", "class": 0},
    "top cross entropy": {"kind": "cross_entropy"},
    "kl div of a class": {"kind": "kl_div", "class": 9},
    "kl div of a target": {"kind": "kl_div", "target": [0.1] * 10},
    "logit difference": {"terms": [[1, 3], [-1, 7]]},
    "cross entropy of a target": {"kind": "cross_entropy", "target": [0.1] * 10},
    "squared error": {"kind": "mse", "target": [0.5] * 10},
    "norm of a layer": {"kind": "norm", "layer": "pool"},
    "channels of a layer": {"kind": "layer", "layer": "pool", "terms": [[1, 7], [-1, 0]]},
    "sum": {"kind": "sum"},
    "mean": {"kind": "mean"},
    "layer": {"kind": "layer", "layer": "pool"},
    "channel of a layer": {"kind": "layer", "layer": "pool", "channel": 7},
    "layer before": {"kind": "layer", "layer": "block1"},
    "layer at its input": {"kind": "layer", "layer": "pool:input"},
}
WRONG: dict[str, Json] = {
    "unknown kind": {"kind": "accuracy"},
    "class that is not there": {"kind": "logit", "class": 10},
    "class of a sum": {"kind": "sum", "class": 1},
    "short target": {"kind": "kl_div", "target": [1.0]},
    "target that is no distribution": {"kind": "kl_div", "target": [1.0] * 10},
    "layer of a logit": {"kind": "logit", "layer": "pool"},
    "layer without a name": {"kind": "layer"},
    "unknown layer": {"kind": "layer", "layer": "nothing"},
    "channel that is not there": {"kind": "layer", "layer": "head", "channel": 99},
    "class by name": {"kind": "logit", "class": "cat"},
    "two layers": {"kind": "layer", "layer": "block?"},
}
LAYERS = (
    "block3:grad_output",
    "block3:grad_input",
    "head:grad_output",
    ".:grad_input",
    "block2.relu#0:grad_output",
    "block2.relu#*:grad_output",
    "*:grad_output",
    "block?:grad_input",
)


def requests() -> Iterator[Request]:
    """Two pictures each, to ``digits``."""
    for name, objective in (OBJECTIVES | WRONG).items():
        layers = [{"layer": "block2:grad_output", "pool": "mean"}, {"layer": "pool:grad_output"}]
        document = {"layers": layers, "objective": objective, "inputs": INPUTS}
        yield post(f"gradients/{name}", document)
    for layer in LAYERS:
        entry = {"layer": layer, "stats": ["mean", "l2"]}
        yield post(f"gradients/at {layer}", {"layers": [entry], "objective": {"kind": "sum"}, "inputs": INPUTS})
    yield post("gradients/values beside", {"layers": ["head", "head:grad_input"], "objective": {}, "inputs": INPUTS})
    yield post("gradients/whole map", {"layers": ["block3:grad_output"], "objective": {}, "inputs": INPUTS})
    yield post("gradients/without objective", {"layers": ["block3:grad_output"], "inputs": INPUTS})
    yield post("gradients/objective alone", {"layers": ["block3"], "objective": {}, "inputs": INPUTS})
    yield post("gradients/isolated", {"layers": [".:grad_input"], "objective": {}, "isolated": True, "inputs": INPUTS})
    for name in ("json", "npy", "npz", "safetensors"):
        query: Json = {"layers": "pool:grad_output", "objective": "logit", "class": "3", "format": name}
        yield send(f"gradients/query as {name}", PNG, "image/png", **query)
    yield send("gradients/dry run", PNG, "image/png", layers="pool:grad_output", objective="sum", dry_run="true")
    yield post(
        "gradients/verified",
        {"layers": ["pool", "pool:grad_output"], "objective": {}, "verify": True, "inputs": INPUTS},
    )
