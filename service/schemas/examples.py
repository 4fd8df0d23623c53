"""Examples for the OpenAPI document, by the names of its schemas: tests send each of a request and expect 200.

They are for the embedded model and, where they are of texts, for a model that is called bert.
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
TENSOR: Json = {"dtype": "uint8", "shape": [8, 8, 3], "data": PIXELS}
PICTURE: Json = {"image": PNG}
TEXT: Json = {"text": "a cat sat on the mat"}
OBJECTIVE: Json = {"kind": "logit", "class": 3}
SOURCE: Json = {"input": 0, "layer": "block2"}
ZERO: Json = {"layer": "block2", "op": "zero", "channels": [3, 7]}
REPLACE: Json = {"layer": "block2", "op": "replace", "from": SOURCE}  # of one input: another has the tensor

# What may be asked of POST /extract, by what is shown.
EXTRACT: dict[str, Json] = {
    "a picture's embedding": {"inputs": [PICTURE]},
    "several layers": {
        "model": "digits",
        "layers": ["block1", {"layer": "block3", "pool": "mean", "normalize": True, "as": "vector"}],
        "encoding": "base64",
        "inputs": [PICTURE, PICTURE],
    },
    "a text": {"model": "bert", "inputs": [TEXT]},
    "decoded pixels": {"layers": ["head"], "inputs": [{"tensor": TENSOR}]},
    "a gradient": {
        "layers": [{"layer": "block3:grad_output", "pool": "mean"}],
        "objective": OBJECTIVE,
        "inputs": [PICTURE],
    },
    "a changed value": {"layers": ["head"], "interventions": [ZERO], "inputs": [PICTURE]},
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
# Values of parameters that need explaining, by their names: all that one operation has make a request together.
PARAMETERS: Json = {
    "name": "digits",
    "model": "digits",
    "layers": "block2,head",
    "method": "grad_cam,integrated_gradients,smoothgrad,occlusion",
    "layer": "block2",
    "classes": "top,3",
    "match": "block?.conv*",
    "type": "Conv2d",
}

FINGERPRINT = "f2a0fb7d9df1f0de4ae71cd9fb4d7184"
PROBE: Json = {"input": "picture", "values": "k5aQQHYyRCL1NGE0eS9fL/8shzA="}
NUMBERS = [[-6.87, -1.66, -0.92, 8.94, -8.69, -2.03, -7.77, -1.84, -1.51, 0.49]]
FEATURE: Json = {"shape": [1, 10], "dtype": "float32", "data": NUMBERS}
RECEIPT: Json = {
    "layer": "head",
    "call": 0,
    "module": "Linear",
    "site": "output",
    "layout": "NC",
    "captured": [1, 10],
    "dtype": "float32",
    "pool": "none",
    "fingerprint": FINGERPRINT,
}
FAULT: Json = {
    "detail": "the bytes are not a picture of a known format",
    "hint": "send a complete JPEG, PNG, WebP, AVIF, GIF or BMP file",
    "pointer": "/inputs/1",
    "input": 1,
}
FEATURE_SIZE: Json = {"shape": [1, 10], "dtype": "float32", "bytes": 40}
MODEL_INPUT: Json = {"name": "image", "shape": [3, 32, 32], "dtype": "float32"}
PREPROCESSING: Json = {
    "resize": 32,
    "crop": 32,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bilinear",
    "decode": "exact",
}
NAMES: Json = {"count": 1, "names": ["head.scale"]}
CHECKPOINT: Json = {"key": "state_dict", "prefix": "module.", "left_over": NAMES}
LABELS: Json = {"count": 10, "from": "configuration"}
EMBEDDING_CHOICE: Json = {"pool": "mean", "normalize": False, "reason": "the configuration names it"}
TEXT_INPUTS: Json = {"takes": ["text", "tokens"], "max_tokens": 512, "vocabulary": 30522, "mask": "attention_mask"}
MODEL: Json = {
    "name": "digits",
    "state": "ready",
    "source": "python:layertap.models.digits:digits",
    "dtype": "float32",
    "device": "cpu",
    "inputs": [MODEL_INPUT],
    "preprocess": PREPROCESSING,
    "weights": "digits.safetensors",
    "weights_digest": "ef6a6e6a9b3877fd189f129d614660617c7ba48d58283e2fcf3c8a30b75c2b21",
    "embedding": "pool",
    "embedding_choice": EMBEDDING_CHOICE,
    "labels": None,
    "layers": 22,
    "hooks": 0,
    "deterministic": True,
    "memory_bytes": 294800,
    "total_memory_bytes": 294800,
}
LIMITS: Json = {
    "max_inputs": 256,
    "max_body_bytes": 33554432,
    "body_timeout_s": 15.0,
    "max_pixels": 50000000,
    "max_resized_pixels": 4000000,
    "max_json_depth": 32,
    "max_results": 1024,
    "max_changed_inputs": 16_384,
    "max_reply_bytes": 268435456,
    "max_queue_rows": 1024,
    "max_queue_bytes": 1073741824,
    "deadline_s": 30.0,
}
OUT_TENSOR: Json = {"path": "", "shape": [1, 32, 16, 16], "dtype": "float32", "layout": "NCHW"}
CALL_TENSOR: Json = {"call": 0, **OUT_TENSOR}
ATTENTION: Json = {
    "call": 0,
    "path": "",
    "shape": [1, 12, 197, 197],
    "dtype": "float32",
    "layout": "NAQK",
    "how": "recomputed",
}
FUNCTION: Json = {"call": 0, "name": "add#0", "outputs": [OUT_TENSOR], "inputs": [OUT_TENSOR, OUT_TENSOR]}
LAYER: Json = {
    "name": "block2.relu",
    "type": "ReLU",
    "leaf": True,
    "calls": 1,
    "outputs": [CALL_TENSOR],
    "inputs": [CALL_TENSOR],
    "attention": [],
    "attention_sink": [],
    "parameters": 0,
    "layout": "NCHW",
    "cost": 0.5737,
    "share": 0.0121,
    "hazards": ["inplace"],
}

EXAMPLES: dict[str, list[Any]] = {
    "ExtractBody": list(EXTRACT.values()),
    "ExplainBody": list(EXPLAIN.values()),
    "InputBody": [PICTURE, {"tensor": TENSOR}, TEXT, {"tokens": [101, 1037, 4937, 102]}],
    "TensorBody": [TENSOR],
    "LayerBody": [{"layer": "block3", "pool": "mean", "as": "vector"}, {"type": "Conv2d", "stats": ["mean", "std"]}],
    "ObjectiveBody": [OBJECTIVE, {"kind": "cross_entropy", "class": 3}],
    "InterventionBody": [ZERO, {"layer": "block1", "op": "scale", "by": 0.5}],
    "SourceBody": [SOURCE],
    "Problem": [
        {
            "type": "urn:layertap:problem:invalid-request",
            "title": "Unprocessable Content",
            "status": 422,
            "detail": FAULT["detail"],
            "hint": FAULT["hint"],
            "request_id": "5d3ad1cf5d6d4e0e8f6b3f7a2f1c9b80",
            "errors": [FAULT],
        }
    ],
    "Fault": [FAULT],
    "FeaturesReply": [
        {
            "model": "digits",
            "fingerprint": FINGERPRINT,
            "rows": 1,
            "features": {"head": FEATURE},
            "receipts": {"head": RECEIPT},
            "errors": [],
        }
    ],
    "Feature": [FEATURE, {"shape": [1, 2], "dtype": "float32", "data": "AACAPwAAAEA="}],
    "Receipt": [RECEIPT],
    "Probe": [PROBE],
    "ProbeReply": [{"model": "digits", "fingerprint": FINGERPRINT, "receipts": {"head": {**RECEIPT, "probe": PROBE}}}],
    "DryRunReply": [
        {
            "model": "digits",
            "fingerprint": FINGERPRINT,
            "rows": 1,
            "features": {"head": FEATURE_SIZE},
            "bytes": 40,
            "stops_at": "head#0:output",
            "cost": 1.0,
            "seconds": 0.000786,
            "warnings": [],
            "errors": [],
        }
    ],
    "TopClassReply": [{"class": 3, "score": 8.94, "probability": 0.9998}],
    "FeatureSize": [FEATURE_SIZE],
    "ModelsReply": [{"default": "digits", "aliases": {"prod": "digits"}, "models": [MODEL], "limits": LIMITS}],
    "Model": [MODEL],
    "ReloadReply": [
        {"added": [], "removed": [], "changed": {"digits": ["weights"]}, "aliases": {"prod": "digits"}, "default": None}
    ],
    "Replacement": [{"state": "loading"}],
    "ModelInput": [MODEL_INPUT],
    "Preprocessing": [PREPROCESSING],
    "LibraryPreprocessing": [{"processor": "LevitImageProcessorPil", "settings": FINGERPRINT, "decode": "exact"}],
    "Checkpoint": [CHECKPOINT],
    "CountedNames": [NAMES],
    "ModelLabels": [LABELS],
    "LabelsReply": [{"model": "pets", "labels": ["cat", "dog", "hamster"]}, {"model": "digits", "labels": None}],
    "EmbeddingChoice": [EMBEDDING_CHOICE],
    "TextInputs": [TEXT_INPUTS],
    "Limits": [LIMITS],
    "LayersReply": [{"model": "digits", "layers": [LAYER], "seconds": 0.000786, "rowwise": True, "embedding": "pool"}],
    "Layer": [LAYER],
    "Tensor": [OUT_TENSOR],
    "CallTensor": [CALL_TENSOR],
    "AttentionTensor": [ATTENTION],
    "LayerFunction": [FUNCTION],
    "HealthReply": [{"status": "ready", "failed": ["weights"]}],
}
