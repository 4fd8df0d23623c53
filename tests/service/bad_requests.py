"""Bad requests to ``POST /extract``, what is wrong with each, and what the answer has to say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.service.support import Array, Json, image, npy, npz, picture, raw, safetensors_of, tensor

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
    "not JSON": Case(400, text("{'layers': 1}")),
    "5,000 digits": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 5000 + "}]}")),
    "a key twice": Case(400, text('{"layers": ["pool"], "pool": "mean", "layers": ["head"]}'), says="'layers' twice"),
    "deep, with a quoted colon": Case(400, text('{"a": "\\":", "b": ' + "[" * 990 + "]" * 990 + "}"), says="too deep"),
    "very deep": Case(400, text("[" * 10_000 + "]" * 10_000)),
    "no boundary": Case(400, text("--x--", "multipart/form-data")),
    "multipart cut short": Case(400, multipart(PART.format("request", REQUEST))),
    "multipart of an endless header": Case(400, text(f"--x\r\nX: {'a' * 500_000}", FORM)),
    "multipart of many headers": Case(400, text("--x\r\n" + "X: a\r\n" * 50_000 + "\r\na\r\n--x--\r\n", FORM)),
    "a boundary of 300 characters": Case(400, multipart(f"--{'x' * 300}--\n", "x" * 300)),
    # 404, 405
    "unknown model": Case(404, body(model="digit"), says="'digits'"),
    "unknown route": Case(404, body(), path="/nowhere"),
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
    "pixels": Case(413, body(inputs=[image(picture(size=(101, 100)))]), input=0, says="10100"),
    "JSON inputs": Case(413, body(inputs=[image(PNG)] * 5), says="5 inputs"),
    "1,001 parts": Case(413, text(FILE * 1001 + "--x--\r\n", FORM), says="at most 4 inputs"),
    "rows of a batch": Case(413, raw(npy(np.zeros((5, 3, 32, 32), np.float32)), "application/x-npy", **ONE), says="5"),
    "results": Case(413, body(layers=["*"]), says="8"),
    "predicted reply": Case(413, body(layers=["block1", "block2"]), says="is 400000"),
    "predicted reply of arrays": Case(
        413,
        raw(npy(np.zeros((4, 3, 32, 32), np.float32)), "application/x-npy", layers="block?", format="npz"),
        says="400000",
    ),
    "numbers in lists": Case(413, body(layers=["block1", "block1.*"]), says="lists, the limit is 60000"),
    "numbers of a body": Case(
        413, text('{"layers": [' + "1," * 60_001 + "1]}"), says="more commas than the limit, 60000"
    ),
    "very many brackets": Case(413, text("[" + "{}," * 10_000 + "[]" * 5_001), says="colons than the limit, 15000"),
    "very many keys": Case(413, text('{"layers": {' + '"":' * 15_000 + "}}"), says="colons than the limit, 15000"),
    "npz that unpacks to much": Case(413, raw(npz(image=np.zeros(10**6)), "application/x-npz", **ONE), says="2000000"),
    "too many layers": Case(413, body(layers=["p"] * 50_000), says="names 50000 results, the limit is 8"),
    # 415
    "no type": Case(415, {"content": b"x"}, says="application/json"),
    "packed body": Case(415, {"content": b"x", "headers": {"content-encoding": "br"}}, says="uncompressed"),
    # 422: texts
    # 422: fields
    "not an object": Case(422, {"json": []}, says="object"),
    "unknown field": Case(422, body(laiers=1), pointer="/laiers", says="'laiers'"),
    "unknown field of a generation": Case(
        422, body(generate={"steps": 2, "temprature": 0.5}), pointer="/generate/temprature", says="'temperature'"
    ),
    "unknown field of a sweep": Case(
        422, body(op="zero", vallues=[1]), pointer="/vallues", says="'values'", path="/sweep"
    ),
    "unknown field of another model": Case(
        422,
        body(**{"with": {"modle": "m", "layers": ["pool"]}}),
        pointer="/with/modle",
        says="'model'",
        path="/compare",
    ),
    "a field with a slash": Case(422, body(**{"a/b~c": 1}), pointer="/a~1b~0c"),
    "wrong pool": Case(422, body(pool="median"), pointer="/pool", says="'gem'"),
    "another library's pool": Case(422, body(pool="avg"), pointer="/pool", says="did you mean 'mean'"),
    "a word for a flag": Case(422, body(normalize="yes"), pointer="/normalize", says="true or false"),
    "no method": Case(422, body(), pointer="/method", says="?method=grad_cam", path="/explain"),
    # 422: statistics
    "unknown statistic": Case(
        422, body(layers=[{"layer": "pool", "stats": ["median"]}]), pointer="/layers/0/stats", says="nonfinite"
    ),
    # 422: what changes and what is differentiated
    "missing parameter": Case(422, body(interventions=[{"layer": "pool", "op": "scale"}]), says="needs 'by'"),
    "gradient without objective": Case(422, body(layers=["pool:grad_output"]), pointer="/layers/0", says="objective"),
    "class out of range": Case(422, graded({"kind": "logit", "class": 10}), pointer="/objective", says="0 to 9"),
    # 422: names
    "near name": Case(422, body(layers=["block2.conv3"]), pointer="/layers/0", says="block2.conv"),
    "a pattern of stars": Case(422, body(layers=["*a" * 250]), pointer="/layers/0"),
    # 422: inputs
    "no inputs": Case(422, {"json": {"layers": ["pool"]}}, says="dry_run"),
    "an empty input": Case(422, body(inputs=[{}]), input=0, pointer="/inputs/0"),
    "not base64": Case(422, body(inputs=[{"image": "not base64!"}]), input=0, says="base64"),
    "an empty image": Case(422, raw(b"", "image/png", **ONE), input=0, says="no bytes"),
    "an image cut short": Case(422, raw(PNG[:200], "image/png", **ONE), input=0),
    "a tensor of another shape": Case(422, body(inputs=[tensor(ROW[:1])]), input=0, says="[3, 32, 32]"),
    "NaN in a tensor": Case(422, body(inputs=[tensor(ROW), tensor(spoiled())]), input=1, says="finite"),
    "a text that is not UTF-8": Case(422, raw("käse".encode("latin-1"), "text/plain", **ONE), input=0, says="UTF-8"),
    "npy of pickles": Case(422, raw(npy(np.array([{}], object)), "application/x-npy", **ONE), input=0),
    "npz of words": Case(422, raw(b"PK words", "application/x-npz", **ONE), input=0, says="numpy.savez"),
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
    "dry_run": Case(422, {**body(), "params": {"dry_run": "perhaps"}}, says="'dry_run'"),
    **{
        f"X-Request-Timeout: {value}": Case(422, {**body(), "headers": {"x-request-timeout": value}})
        for value in ("nan", "soon")
    },
}
