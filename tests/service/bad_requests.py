"""Bad requests to ``POST /extract``, what is wrong with each, and what the answer has to say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.service.support import Array, Json, image, npy, picture, raw, safetensors_of, tensor

PNG = picture(1)
GOOD: Json = {"layers": ["pool"], "inputs": [image(PNG)]}
ROW = np.zeros((3, 32, 32), np.float32)
ONE = {"layers": "pool"}
LONG = "Q" * 400


@dataclass(frozen=True)
class Case:
    """A bad request to ``POST /extract``: its status, and what the first of its faults says beside words."""

    status: int
    request: Json
    pointer: str | None = None
    input: int | None = None
    says: str = ""
    path: str = "/extract"


def body(**changes: Any) -> Json:
    """A JSON request that differs from a good one."""
    return {"json": GOOD | changes}


def graded(objective: Json) -> Json:
    """A JSON request for a gradient."""
    return body(layers=["block3:grad_output"], objective=objective)


def text(content: str | bytes, media_type: str = "application/json") -> Json:
    """A request whose body is written by hand."""
    return {"content": content, "headers": {"content-type": media_type.encode("latin-1")}}


def multipart(content: str, boundary: str = "x") -> Json:
    """A multipart body written by hand."""
    return text(content.replace("\n", "\r\n"), f"multipart/form-data; boundary={boundary}")


def spoiled(shape: tuple[int, ...] = (3, 32, 32), value: float = np.nan) -> Array:
    """Zeros, but for the last."""
    array: Array = np.zeros(shape, np.float32)
    array.flat[-1] = value
    return array


PART = '--x\nContent-Disposition: form-data; name="{}"\n\n{}\n'
REQUEST = json.dumps({"layers": ["pool"]})

FORM = "multipart/form-data; boundary=x"
FILE = '--x\r\nContent-Disposition: form-data; name="images"; filename="p.png"\r\n\r\np\r\n'

BAD: dict[str, Case] = {
    # 400
    "empty JSON": Case(400, text("")),
    "not JSON": Case(400, text("{'layers': 1}")),
    "NaN": Case(400, text('{"layers": [NaN]}')),
    "5,000 digits": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 5000 + "}]}")),
    "very deep": Case(400, text("[" * 100_000 + "]" * 100_000)),
    "no boundary": Case(400, text("--x--", "multipart/form-data")),
    "multipart cut short": Case(400, multipart(PART.format("request", REQUEST))),
    "multipart of an endless header": Case(400, text(f"--x\r\nX: {'a' * 500_000}", FORM)),
    "multipart of many headers": Case(400, text("--x\r\n" + "X: a\r\n" * 50_000 + "\r\na\r\n--x--\r\n", FORM)),
    "multipart of many parameters": Case(400, text("--x\r\nContent-Disposition: " + "a=b;" * 99_999, FORM)),
    "very many brackets": Case(413, body(layers=[[]] * 500_001), says="500000"),
    # 404, 405
    "unknown model": Case(404, body(model="digit"), says="'digits'"),
    "a model named like a file": Case(404, body(model="../../etc/passwd")),
    "unknown route": Case(404, body(), path="/nowhere"),
    "a route that climbs": Case(404, body(), path="/models/..%2f..%2fetc%2fpasswd/load"),
    "wrong method": Case(405, body(), path="/models"),
    # What may be said once
    "two formats": Case(422, {**body(), "params": {"format": ["json", "npy"]}}, says="'format' is given 2 times"),
    # 406
    "unknown format": Case(406, {**body(), "params": {"format": "exe"}}, says="safetensors"),
    "unknown type": Case(406, {**body(), "headers": {"accept": "text/html"}}, says="application/json"),
    "two results as npy": Case(
        406, {**body(layers=["pool", "head"]), "params": {"format": "npy"}}, says="application/x-npz"
    ),
    # 413
    "pixels of a tensor": Case(
        413, raw(npy(np.zeros((3, 1, 40_001), np.float16)), "application/x-npy", **ONE), says="limit"
    ),
    "body announced": Case(413, raw(b"\0" * 2_000_001, "image/png", **ONE), says="2000001"),
    "body in chunks": Case(413, raw((b"\0" * 500_000 for _ in range(9)), "image/png", **ONE), says="2000000"),  # type: ignore[arg-type]
    "pixels": Case(413, body(inputs=[image(picture(size=(101, 100)))]), input=0, says="10100"),
    "resized pixels": Case(413, raw(picture(size=(1, 1300)), "image/png", **ONE), input=0, says="40000"),
    "JSON inputs": Case(413, body(inputs=[image(PNG)] * 5), says="5 inputs"),
    "1,001 parts": Case(413, text(FILE * 1001 + "--x--\r\n", FORM), says="at most 4 inputs"),
    "rows of a batch": Case(413, raw(npy(np.zeros((5, 3, 32, 32), np.float32)), "application/x-npy", **ONE), says="5"),
    "results": Case(413, body(layers=["*"]), says="8"),
    "predicted reply": Case(413, body(layers=["block1", "block2", "block1.*"]), says="400000"),
    # 415
    "no type": Case(415, {"content": b"x"}, says="application/json"),
    "npz": Case(415, raw(b"PK", "application/x-npz", **ONE), says="safetensors"),
    "packed body": Case(415, {"content": b"x", "headers": {"content-encoding": "br"}}, says="uncompressed"),
    # 422: texts
    "a text for pictures": Case(422, body(inputs=[{"text": "a cat"}]), input=0, says="takes no text"),
    # 422: fields
    "not an object": Case(422, {"json": []}, says="object"),
    "no name among layers": Case(422, raw(PNG, "image/png", layers=""), pointer="/layers"),
    "too many layers": Case(422, body(layers=["p"] * 50_001), pointer="/layers"),
    "unknown field": Case(422, body(laiers=1), pointer="/laiers", says="'laiers'"),
    "unknown field of a layer": Case(
        422, body(layers=[{"layer": "pool", "__class__": 1}]), pointer="/layers/0/__class__"
    ),
    "unknown field of an input": Case(422, body(inputs=[{"path": "/etc/passwd"}]), pointer="/inputs/0/path"),
    "a field with a slash": Case(422, body(**{"a/b~c": 1}), pointer="/a~1b~0c"),
    "a long field": Case(422, body(**{LONG: 1})),
    "wrong pool": Case(422, body(pool="average"), pointer="/pool", says="'gem'"),
    "huge call": Case(422, body(layers=[{"layer": "pool", "call": 2**62}]), pointer="/layers/0"),
    # 422: statistics
    "unknown statistic": Case(
        422, body(layers=[{"layer": "pool", "stats": ["median"]}]), pointer="/layers/0/stats", says="nonfinite"
    ),
    "statistics of a pool": Case(
        422, body(layers=["pool", {"layer": "pool", "stats": True, "pool": "mean"}]), pointer="/layers/1", says="'pool'"
    ),
    # 422: what changes and what is differentiated
    "nowhere to intervene": Case(422, body(interventions=[{"op": "zero"}]), pointer="/interventions/0"),
    "unknown op": Case(422, body(interventions=[{"layer": "pool", "op": "exec"}]), says="'zero', 'scale'"),
    "NaN by": Case(422, body(interventions=[{"layer": "pool", "op": "scale", "by": "nan"}])),
    "negative std": Case(422, body(interventions=[{"layer": "pool", "op": "noise", "std": -1}])),
    "missing parameter": Case(422, body(interventions=[{"layer": "pool", "op": "scale"}]), says="needs 'by'"),
    "unknown layer to change": Case(
        422, body(interventions=[{"layer": "poll", "op": "zero"}]), pointer="/interventions/0", says="pool"
    ),
    "region beyond": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "region": [0, 0, 999, 1]}])),
    "replacement of a wrong shape": Case(
        422,
        body(interventions=[{"layer": "pool", "op": "replace", **tensor(np.zeros((2, 2), np.float32))}]),
        pointer="/interventions/0",
        says="send",
    ),
    "attention as a site to change": Case(
        422, body(interventions=[{"layer": "pool", "op": "zero", "site": "grad_input"}]), pointer="/interventions/0"
    ),
    "clipping without objective": Case(
        422, body(interventions=[{"layer": "pool", "op": "clamp", "max": 1, "site": "grad_output"}]), says="objective"
    ),
    "gradient without objective": Case(422, body(layers=["pool:grad_output"]), pointer="/layers/0", says="objective"),
    "objective without gradient": Case(422, body(objective={"kind": "sum"}), says="grad_output"),
    "unknown kind": Case(422, graded({"kind": "accuracy"}), pointer="/objective/kind"),
    "class out of range": Case(422, graded({"kind": "logit", "class": 10}), pointer="/objective", says="0 to 9"),
    "target that is no distribution": Case(422, graded({"kind": "kl_div", "target": [1.0] * 10}), pointer="/objective"),
    "term out of range": Case(422, graded({"terms": [[1, 2], [1, 10]]}), pointer="/objective", says="0 to 9"),
    "objective before the gradient": Case(422, graded({"kind": "layer", "layer": "block1"}), says="runs later"),
    "verify beside interventions": Case(
        422, body(verify=True, interventions=[{"layer": "pool", "op": "zero"}]), pointer="/verify", says="without"
    ),
    # 422: names
    "near name": Case(422, body(layers=["block2.conv3"]), pointer="/layers/0", says="block2.conv"),
    "an attribute": Case(422, body(layers=["__class__"]), pointer="/layers/0"),
    "an attribute as a site": Case(422, body(layers=["pool:__class__"]), pointer="/layers/0"),
    "a file": Case(422, body(layers=["../../etc/passwd"]), pointer="/layers/0"),
    "a name of 1 MB": Case(422, body(layers=["Q" * 2**20]), pointer="/layers/0/layer"),
    "a pattern of stars": Case(422, body(layers=["*a" * 250]), pointer="/layers/0"),
    "50,000 of one unknown name": Case(422, body(layers=["block9"] * 50_000), pointer="/layers/0"),
    "no attention": Case(422, body(layers=["pool:attention"]), pointer="/layers/0", says="computes no attention"),
    # 422: inputs
    "no inputs": Case(422, {"json": {"layers": ["pool"]}}, says="dry_run"),
    "an empty input": Case(422, body(inputs=[{}]), input=0, pointer="/inputs/0"),
    "a URL": Case(422, body(inputs=[{"url": "http://127.0.0.1/x.png"}]), input=0, says="'image'"),
    "not base64": Case(422, body(inputs=[{"image": "not base64!"}]), input=0, says="base64"),
    "an image cut short": Case(422, raw(PNG[:200], "image/png", **ONE), input=0),
    "a tensor of another shape": Case(422, body(inputs=[tensor(ROW[:1])]), input=0, says="[3, 32, 32]"),
    "two shapes of a layer's output": Case(
        422,
        body(resume="block1", inputs=[tensor(np.zeros((16, side, side), np.float32)) for side in (32, 24)]),
        input=1,
    ),
    "NaN in a tensor": Case(422, body(inputs=[tensor(ROW), tensor(spoiled())]), input=1, says="finite"),
    "unknown dtype": Case(422, body(inputs=[{"tensor": {"dtype": "object", "shape": [1], "data": ""}}]), input=0),
    "a huge shape": Case(
        422, body(inputs=[{"tensor": {"dtype": "float32", "shape": [2**39] * 8, "data": ""}}]), input=0
    ),
    "a text that is not UTF-8": Case(422, raw("käse".encode("latin-1"), "text/plain", **ONE), input=0, says="UTF-8"),
    "npy of pickles": Case(422, raw(npy(np.array([{}], object)), "application/x-npy", **ONE), input=0),
    "safetensors of two": Case(
        422, raw(safetensors_of(image=ROW, other=ROW), "application/x-safetensors", **ONE), input=0, says="image"
    ),
    "a picture for a model of tensors": Case(422, body(model="gated", layers=["linear"]), input=0, says="float32 [4]"),
    "a part of another name": Case(
        422, {"files": [("images", PNG), ("image", PNG)], "params": ONE}, says="safetensors"
    ),
    # 422: parameters and headers
    "unknown parameter": Case(422, raw(PNG, "image/png", **ONE, lairs="x"), says="layers"),
    "parameters beside JSON": Case(422, {**body(), "params": {"pool": "mean"}}, says="JSON"),
    "parameters beside a request part": Case(
        422, {"files": [("images", PNG), ("request", REQUEST)], "params": {"pool": "mean"}}, says="'request'"
    ),
    "a parameter given twice": Case(422, raw(PNG, "image/png", layers="pool", pool=["mean", "max"]), says="once"),
    "dry_run": Case(422, {**body(), "params": {"dry_run": "perhaps"}}, says="'dry_run'"),
    **{
        f"X-Request-Timeout: {value}": Case(422, {**body(), "headers": {"x-request-timeout": value}})
        for value in ("-1", "nan", "soon")
    },
}
