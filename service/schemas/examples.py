"""Examples of requests for the OpenAPI document: tests send each and expect 200.

They are for the embedded model and, if they have texts, for a model named bert.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# A handwritten three of 8 x 8 pixels, as a PNG file and as decoded RGB pixels.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAARklEQVR42jXGMRGAIAAAwD/OHRpoE2hiBM8EVLCBFWxABCpoAozg5E+PbfQIta8jwx"
    "x7R/Ck5Y5AbO3fWQVqLiWZeA/X7gNUCQ+kWdtNDgAAAABJRU5ErkJggg=="
)
PIXELS = (
    "AAAAAAAAb29v7+/vz8/PDw8PAAAAAAAAAAAAf39/z8/PX19f7+/vPz8/AAAAAAAAAAAAHx8fDw8Pz8/Pz8/PAAAAAAAAAAAAAAAAAAAAHx8f7+/vr6+v"
    "Dw8PAAAAAAAAAAAAAAAAAAAADw8Pv7+/v7+/Dw8PAAAAAAAAAAAAAAAAAAAADw8Pn5+ff39/AAAAAAAAAAAAf39/Pz8/T09P39/fj4+PAAAAAAAAAAAA"
    "b29vz8/Pz8/Pj4+PAAAAAAAA"
)
PICTURE: Json = {"image": PNG}
OBJECTIVE: Json = {"kind": "logit", "class": 3}
ZERO: Json = {"layer": "block2", "op": "zero", "channels": [3, 7]}
REPLACE: Json = {"layer": "block2", "op": "replace", "from": {"input": 0}}  # of one input: another has the value

# Requests to POST /extract, by what they show.
EXTRACT: dict[str, Json] = {
    "a picture's embedding": {"inputs": [PICTURE]},
    "several layers": {
        "model": "digits",
        "layers": ["block1", {"layer": "block3", "pool": "mean", "normalize": True, "as": "vector"}],
        "encoding": "base64",
        "inputs": [PICTURE, PICTURE],
    },
    "a text": {"model": "bert", "inputs": [{"text": "a cat sat on the mat"}]},
    "a text's tokens": {"model": "bert", "inputs": [{"tokens": [101, 1037, 4937, 102]}]},
    "decoded pixels": {
        "layers": ["head"],
        "inputs": [{"tensor": {"dtype": "uint8", "shape": [8, 8, 3], "data": PIXELS}}],
    },
    "a gradient": {
        "layers": [{"layer": "block3:grad_output", "pool": "mean"}],
        "objective": OBJECTIVE,
        "inputs": [PICTURE],
    },
    "a changed value": {"layers": ["head"], "interventions": [ZERO], "inputs": [PICTURE]},
    "a value of another input": {"layers": ["head"], "inputs": [PICTURE, {**PICTURE, "interventions": [REPLACE]}]},
}
EXPLAIN: dict[str, Json] = {
    "Grad-CAM": {"method": "grad_cam", "layer": "block2", "inputs": [PICTURE]},
    "saliency": {"method": "saliency", "objective": OBJECTIVE, "encoding": "base64", "inputs": [PICTURE]},
    "two methods for two classes": {
        "method": ["grad_cam_plusplus", "guided_backpropagation"],
        "classes": ["top", 3],
        "encoding": "base64",
        "inputs": [PICTURE],
    },
    "integrated gradients": {"method": "integrated_gradients", "steps": 20, "encoding": "base64", "inputs": [PICTURE]},
    "SmoothGrad": {
        "method": "smoothgrad",
        "samples": 10,
        "noise": 0.1,
        "seed": 1,
        "encoding": "base64",
        "inputs": [PICTURE],
    },
    "occlusion": {"method": "occlusion", "window": 8, "stride": 4, "top_classes": 3, "inputs": [PICTURE]},
}
SWEEP: dict[str, Json] = {
    "every channel of a layer, set to zero": {
        "layers": ["block2"],
        "op": "zero",
        "each": "channel",
        "objective": OBJECTIVE,
        "top": 5,
        "inputs": [PICTURE],
    },
    "a layer scaled": {"layers": ["block*"], "op": "scale", "values": [0, 0.5, 2], "inputs": [PICTURE]},
    "each token of another text, put in": {
        "model": "bert",
        "layers": ["*layer.?"],
        "op": "replace",
        "from": {"input": 0},
        "each": "token",
        "objective": {"kind": "norm"},
        "inputs": [{"text": "a cat sat on the mat"}, {"text": "a dog sat on the mat"}],
    },
}
COMPARE: dict[str, Json] = {
    "all pairs of layers": {"layers": ["block?"], "pool": "mean", "measures": "cka", "inputs": [PICTURE, PICTURE]},
    "another model": {
        "layers": ["block?"],
        "with": {"model": "digits", "layers": ["head"]},
        "measures": ["cka", "rsa", "procrustes"],
        "inputs": [PICTURE, PICTURE],
    },
}
OPTIMISE: dict[str, Json] = {
    "an adversarial picture": {
        "steps": 4,
        "learning_rate": 0.01,
        "rule": "sign",
        "pixels": True,
        "epsilon": 0.03,
        "objective": {"kind": "cross_entropy", "class": 3},
        "encoding": "base64",
        "inputs": [PICTURE],
    },
}
# Values of parameters that need explaining, by name: those of one operation make a valid request together.
PARAMETERS: Json = {
    "name": "digits",
    "model": "digits",
    "layers": "block2,head",
    "method": "grad_cam,integrated_gradients,smoothgrad,occlusion",
    "layer": "block2",
    "op": "zero",
    "each": "channel",
    "classes": "top,3",
    "steps": 5,
    "learning_rate": 0.1,
    "clamp": "-1,1",
    "match": "block?.conv*",
    "type": "Conv2d",
}
