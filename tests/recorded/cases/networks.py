"""Networks of every structure: what each has, what it refuses, and a few requests of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tests.recorded.request import (
    Array,
    Json,
    Request,
    get,
    image,
    noise,
    npy,
    picture,
    post,
    safetensors_of,
    send,
    tensor,
    tensors,
)

PICTURES = [image(picture(1)), image(picture(2))]
NAMES = (
    "cnn",
    "vit",
    "encoder",
    "repeats",
    "structured",
    "pair",
    "centred",
    "recurrent",
    "touchy",
    "half",
    "lazy",
    "broken",
    "overwriting",
    "resnet18",
    "timm-vit",
    "bert",
)
SHAPES = {
    "encoder": (5, 8),
    "repeats": (4,),
    "structured": (4,),
    "centred": (4,),
    "recurrent": (6, 4),
    "touchy": (4,),
    "overwriting": (4,),
}
KIND = np.array(2, np.int64)
INPUTS: dict[str, list[Json]] = {
    **{name: [tensor(row) for row in noise(3, *shape)] for name, shape in SHAPES.items()},
    **dict.fromkeys(("cnn", "vit", "half", "resnet18", "timm-vit", "lazy", "broken"), PICTURES),
    "pair": [tensors(numbers=noise(4), kind=KIND), tensors(numbers=noise(4, seed=1), kind=KIND + 1)],
}
EVERY = [{"layer": "*", "stats": ["mean", "l2"]}]
GRADED = [{"layer": "*:grad_output", "stats": ["mean", "l2"]}]
REQUESTS: Mapping[str, Mapping[str, Json]] = {
    "cnn": {
        "calls": {"layers": ["relu#*"], "pool": "mean"},
        "first call": {"layers": ["relu#0"], "pool": "gem"},
        "changed call": {"layers": ["head"], "interventions": [{"layer": "relu#1", "op": "zero"}]},
        "verified": {"layers": ["stem", "conv2"], "pool": "max", "verify": True},
        "inside the shortcut": {
            "layers": ["conv2", "relu#1"],
            "resume": "relu#0",
            "inputs": [tensor(noise(8, 16, 16))],
        },
        "behind the shortcut": {"layers": ["head"], "resume": "conv1", "inputs": [tensor(noise(8, 16, 16))]},
        "warm": {"layers": ["conv1"], "pool": "mean"},
    },
    "vit": {
        "large jpeg": {"layers": ["head"], "inputs": [image(picture(1, (1200, 900), "JPEG"))]},
        "attention": {"layers": ["blocks.*.attention:attention"]},
        "attention gradient": {"layers": ["blocks.0.attention:attention_grad"], "objective": {"class": 1}},
        "attention pooled": {"layers": ["blocks.0.attention:attention"], "pool": "mean"},
        **{
            f"pool {pool}": {"layers": ["blocks.1"], "pool": pool} for pool in ("mean", "mean_all", "max", "gem", "cls")
        },
        "tokens": {"layers": [{"layer": "blocks.1", "tokens": [0, 16, 3]}]},
        "tokens pooled": {"layers": [{"layer": "blocks.1", "tokens": [0, 2], "pool": "mean"}]},
        "token that is not there": {"layers": [{"layer": "blocks.1", "tokens": [17]}]},
        "changed tokens": {"layers": ["head"], "interventions": [{"layer": "blocks.0", "op": "zero", "tokens": [0]}]},
        "changed tokens and channels": {
            "layers": ["head"],
            "interventions": [{"layer": "blocks.0", "op": "add", "value": 1.5, "tokens": [1, 2], "channels": [0]}],
        },
        "noise": {
            "layers": ["head"],
            "interventions": [{"layer": "blocks.0:input", "op": "noise", "std": 1, "seed": 3}],
        },
    },
    "encoder": {
        "attention": {"layers": ["*:attention"]},
        "class token": {"layers": ["encoder.layers.1"], "pool": "cls"},
        "prefix": {"layers": ["encoder.layers.1"], "pool": "mean"},
    },
    "repeats": {
        "calls": {"layers": ["step#*", "act#1", "step#-1:input"]},
        "call that is not there": {"layers": ["step#3"]},
        "what never runs": {"layers": ["unused"]},
        "changed calls": {"layers": ["."], "interventions": [{"layer": "act#0", "op": "scale", "by": 2}]},
        "gradients of calls": {"layers": ["step#*:grad_output"], "objective": {"kind": "sum"}},
        "resumed call": {"layers": ["step#2"], "resume": "step#0"},
    },
    "structured": {
        "paths": {"layers": [".[logits]", ".[pair][1]", "branches[more][0][deep]", ".[index]"]},
        "whole": {"layers": ["."]},
        "unknown path": {"layers": [".[logit]"]},
        "changed path": {"layers": ["."], "interventions": [{"layer": "branches[pair][0]", "op": "zero"}]},
        "gradient": {"layers": ["linear:grad_output"], "objective": {"class": 0}},
        "integers in int8": {"layers": [".[index]"], "dtype": "int8"},
    },
    "pair": {
        "keyword": {"layers": ["gate[gate]:input", "gate[0]:input", ".[kind]:input"]},
        "unnamed": {"layers": ["gate"], "inputs": [tensor(noise(4))]},
        "one missing": {"layers": ["gate"], "inputs": [tensors(numbers=noise(4))]},
        "a number beyond": {"layers": ["gate"], "inputs": [tensors(numbers=noise(4), kind=KIND + 7)]},
        "a picture": {"layers": ["gate"], "inputs": PICTURES},
    },
    "centred": {
        "isolated": {"layers": ["act"], "isolated": True},
        "apart": {"layers": ["act"]},
        "gradient": {"layers": ["linear:grad_output"], "objective": {"kind": "sum"}, "isolated": True},
    },
    "recurrent": {"tuples": {"layers": ["lstm", "lstm[0]", "lstm[1][0]"]}},
    "touchy": {
        "too large": {"layers": ["linear"], "inputs": [tensor(noise(4) + 5000)]},
        "one too large": {"layers": ["linear"], "inputs": [tensor(noise(4)), tensor(noise(4) + 5000)]},
    },
    "resnet18": {
        "block": {"layers": ["layer1.0.relu#*", "layer2"], "pool": "mean"},
        "scores": {"layers": ["fc", "avgpool"], "pool": "flatten"},
        "gradient": {"layers": ["layer4:grad_output"], "objective": {"class": 5}, "pool": "mean"},
    },
    "timm-vit": {
        "blocks": {"layers": ["blocks.3", "blocks.11"], "pool": "cls"},
        "attention": {
            "layers": [{"layer": "blocks.11.attn:attention", "as": "a", "pool": "flatten", "dtype": "float16"}]
        },
        "scores": {"layers": ["head"]},
    },
}
METHODS: dict[str, Json] = {
    "grad_cam": {"method": "grad_cam"},
    "saliency": {"method": "saliency"},
    "rollout": {"method": "attention_rollout"},
    "rollout without the lowest": {"method": "attention_rollout", "discard_ratio": 0.5},
    "gradient rollout": {"method": "gradient_rollout", "objective": {"class": 2}},
    "relevance": {"method": "relevance"},
}
PAIR: dict[str, Array] = {"numbers": noise(4), "kind": KIND}


def requests() -> Iterator[Request]:
    """Of a server with a configuration."""
    yield get("networks/models", "/models")
    for name in NAMES:
        yield get(f"networks/{name}", f"/models/{name}")
        yield get(f"networks/{name} layers", f"/models/{name}/layers")
        yield get(f"networks/{name} tree", f"/models/{name}/layers", {"accept": "text/plain"})
    for name, inputs in INPUTS.items():
        document = {"model": name, "inputs": inputs}
        yield post(f"networks/{name} embedding", document | {"encoding": "base64"})
        yield post(f"networks/{name} every layer", document | {"layers": EVERY})
        yield post(f"networks/{name} every gradient", document | {"layers": GRADED, "objective": {"kind": "sum"}})
        yield post(f"networks/{name} dry run", document | {"layers": ["*"]}, query={"dry_run": "true"})
        for label, fields in REQUESTS.get(name, {}).items():
            yield post(f"networks/{name} {label}", document | fields)
    for name in ("cnn", "vit", "structured", "timm-vit"):
        for label, method in METHODS.items():
            yield post(f"maps/{name} {label}", {"model": name, "inputs": INPUTS[name], **method}, "/explain")
    yield from _pair()
    for number, path in enumerate(("lazy/unload", "lazy/load", "broken/load", "broken/unload", "vit/unload")):
        yield get(f"networks/{number} {path}", f"/models/{path}", method="POST")
    yield get("networks/ready", "/readyz")


def _pair() -> Iterator[Request]:
    batch = {"numbers": noise(3, 4), "kind": np.arange(3)}
    query: Json = {"model": "pair", "layers": "gate"}
    for label, arrays in (
        ("one", PAIR),
        ("batch", batch),
        ("missing", {"kind": KIND}),
        ("uneven", PAIR | {"kind": batch["kind"]}),
    ):
        yield send(f"pair/safetensors {label}", safetensors_of(**arrays), "application/x-safetensors", **query)
    yield send("pair/npy", npy(noise(4)), "application/x-npy", **query)
