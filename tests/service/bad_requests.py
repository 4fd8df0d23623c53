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
    "BOM": Case(400, text(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())),
    "NaN": Case(400, text('{"layers": [NaN]}')),
    "a number beyond all": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 400 + "}]}")),
    "5,000 digits": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 5000 + "}]}")),
    "lone surrogate": Case(400, text('{"layers": ["\\ud800"]}')),
    "very deep": Case(400, text("[" * 100_000 + "]" * 100_000)),
    "no boundary": Case(400, text("--x--", "multipart/form-data")),
    "boundary too long": Case(400, multipart("--x--", "y" * 5000)),
    "multipart cut short": Case(400, multipart(PART.format("request", REQUEST))),
    "multipart with a bad header": Case(400, multipart("--x\nNo header at all\n\na\n--x--\n")),
    "a request part that is no JSON": Case(400, multipart(PART.format("request", "{") + "--x--\n")),
    "multipart of an endless header": Case(400, text(f"--x\r\nX: {'a' * 500_000}", FORM)),
    "multipart of many headers": Case(400, text("--x\r\n" + "X: a\r\n" * 50_000 + "\r\na\r\n--x--\r\n", FORM)),
    "multipart of many parameters": Case(400, text("--x\r\nContent-Disposition: " + "a=b;" * 99_999, FORM)),
    "very many brackets": Case(413, body(layers=[[]] * 500_001), says="500000"),
    # 404, 405
    "unknown model": Case(404, body(model="digit"), says="'digits'"),
    "a model named like a file": Case(404, body(model="../../etc/passwd")),
    "a model named like an attribute": Case(404, body(model="__class__")),
    "two slashes": Case(404, body(), path="//extract"),
    "unknown route": Case(404, body(), path="/nowhere"),
    "a route that climbs": Case(404, body(), path="/models/..%2f..%2fetc%2fpasswd/load"),
    "wrong method": Case(405, body(), path="/models"),
    # What may be said once
    "two formats": Case(422, {**body(), "params": {"format": ["json", "npy"]}}, says="'format' is given 2 times"),
    # 406
    "unknown format": Case(406, {**body(), "params": {"format": "exe"}}, says="safetensors"),
    "unknown type": Case(406, {**body(), "headers": {"accept": "text/html"}}, says="application/json"),
    "nonsense accepted": Case(406, {**body(), "headers": {"accept": b"\xff;;q=,/"}}),
    "two results as npy": Case(
        406, {**body(layers=["pool", "head"]), "params": {"format": "npy"}}, says="application/x-npz"
    ),
    "int8 as npy": Case(406, {**body(dtype="int8"), "params": {"format": "npy"}}),
    # 413
    "pixels of a tensor": Case(
        413, raw(npy(np.zeros((3, 1, 40_001), np.float16)), "application/x-npy", **ONE), says="limit"
    ),
    "body announced": Case(413, raw(b"\0" * 2_000_001, "image/png", **ONE), says="2000001"),
    "body in chunks": Case(413, raw((b"\0" * 500_000 for _ in range(9)), "image/png", **ONE), says="2000000"),  # type: ignore[arg-type]
    "pixels": Case(413, body(inputs=[image(picture(size=(101, 100)))]), input=0, says="10100"),
    "resized pixels": Case(413, raw(picture(size=(1, 1300)), "image/png", **ONE), input=0, says="40000"),
    "JSON inputs": Case(413, body(inputs=[image(PNG)] * 5), says="5 inputs"),
    "multipart inputs": Case(413, {"files": [("images", PNG)] * 5, "params": ONE}, says="5"),
    "10,001 inputs": Case(413, body(inputs=[{"image": ""}] * 10_001), says="10001 inputs"),
    "1,001 parts": Case(413, text(FILE * 1001 + "--x--\r\n", FORM), says="at most 4 inputs"),
    "rows of a batch": Case(413, raw(npy(np.zeros((5, 3, 32, 32), np.float32)), "application/x-npy", **ONE), says="5"),
    "results": Case(413, body(layers=["*"]), says="8"),
    "distinct names": Case(413, body(layers=[f"block1.{number}" for number in range(50_000)]), says="8"),
    "predicted reply": Case(413, body(layers=["block1", "block2", "block1.*"]), says="400000"),
    # 415
    "no type": Case(415, {"content": b"x"}, says="application/json"),
    "unknown type of body": Case(415, text("x", "text/html"), says="text/plain"),
    "npz": Case(415, raw(b"PK", "application/x-npz", **ONE), says="safetensors"),
    "a text of another charset": Case(415, raw(b"a cat", "text/plain; charset=utf-16", **ONE), says="UTF-8"),
    "packed body": Case(415, {"content": b"x", "headers": {"content-encoding": "br"}}, says="uncompressed"),
    # 422: texts
    "a text for pictures": Case(422, body(inputs=[{"text": "a cat"}]), input=0, says="takes no text"),
    "tokens for pictures": Case(422, body(inputs=[{"tokens": [1, 2]}]), input=0, says="takes no text"),
    "a negative token": Case(422, body(inputs=[{"tokens": [1, -2]}]), pointer="/inputs/0/tokens", says="whole numbers"),
    "a text and tokens": Case(422, body(inputs=[{"text": "a", "tokens": [1]}]), input=0, says="exactly one"),
    # 422: fields
    "not an object": Case(422, {"json": []}, says="object"),
    "no name among layers": Case(422, raw(PNG, "image/png", layers=""), pointer="/layers"),
    "layers of the wrong type": Case(422, body(layers="pool"), pointer="/layers"),
    "too many layers": Case(422, body(layers=["p"] * 50_001), pointer="/layers"),
    "unknown field": Case(422, body(laiers=1), pointer="/laiers", says="'laiers'"),
    "unknown field of a layer": Case(
        422, body(layers=[{"layer": "pool", "__class__": 1}]), pointer="/layers/0/__class__"
    ),
    "unknown field of an input": Case(422, body(inputs=[{"path": "/etc/passwd"}]), pointer="/inputs/0/path"),
    "a field with a slash": Case(422, body(**{"a/b~c": 1}), pointer="/a~1b~0c"),
    "a field of line breaks": Case(422, body(**{"a\r\nX-Evil: 1\0": 1})),
    "a long field": Case(422, body(**{LONG: 1})),
    "many unknown fields": Case(422, body(**{f"field{number}": number for number in range(5000)})),
    "wrong pool": Case(422, body(pool="average"), pointer="/pool", says="'gem'"),
    "long model": Case(422, body(model=LONG), pointer="/model"),
    "wrong call": Case(422, body(layers=[{"layer": "pool", "call": "all"}]), pointer="/layers/0/call"),
    "huge call": Case(422, body(layers=[{"layer": "pool", "call": 2**62}]), pointer="/layers/0"),
    "huge channel": Case(422, body(layers=[{"layer": "pool", "channels": [2**62]}]), pointer="/layers/0/channels/0"),
    "wrong as": Case(422, body(layers=[{"layer": "pool", "as": "../x"}]), pointer="/layers/0/as"),
    # 422: statistics
    "unknown statistic": Case(
        422, body(layers=[{"layer": "pool", "stats": ["median"]}]), pointer="/layers/0/stats", says="nonfinite"
    ),
    "a statistic twice": Case(
        422, body(layers=[{"layer": "pool", "stats": ["mean", "mean"]}]), pointer="/layers/0/stats", says="once"
    ),
    "statistics of a pool": Case(
        422, body(layers=["pool", {"layer": "pool", "stats": True, "pool": "mean"}]), pointer="/layers/1", says="'pool'"
    ),
    # 422: what changes and what is differentiated
    "nowhere to intervene": Case(422, body(interventions=[{"op": "zero"}]), pointer="/interventions/0"),
    "unknown op": Case(422, body(interventions=[{"layer": "pool", "op": "exec"}]), says="'zero', 'scale'"),
    "no op": Case(422, body(interventions=[{"layer": "pool"}]), pointer="/interventions/0/op"),
    "NaN by": Case(422, body(interventions=[{"layer": "pool", "op": "scale", "by": "nan"}])),
    "negative std": Case(422, body(interventions=[{"layer": "pool", "op": "noise", "std": -1}])),
    "wrong parameter": Case(422, body(interventions=[{"layer": "pool", "op": "zero", "by": 2}]), says="takes no 'by'"),
    "missing parameter": Case(422, body(interventions=[{"layer": "pool", "op": "scale"}]), says="needs 'by'"),
    "unknown layer to change": Case(
        422, body(interventions=[{"layer": "poll", "op": "zero"}]), pointer="/interventions/0", says="pool"
    ),
    "channel to change": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "channels": [4096]}])),
    "region beyond": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "region": [0, 0, 999, 1]}])),
    "replacement of a wrong shape": Case(
        422,
        body(interventions=[{"layer": "pool", "op": "replace", **tensor(np.zeros((2, 2), np.float32))}]),
        pointer="/interventions/0",
        says="send",
    ),
    "replacement that is not finite": Case(
        422, body(interventions=[{"layer": "pool", "op": "replace", **tensor(np.full((2, 2), np.nan, np.float32))}])
    ),
    "attention as a site to change": Case(
        422, body(interventions=[{"layer": "pool", "op": "zero", "site": "grad_input"}]), pointer="/interventions/0"
    ),
    "clipping without objective": Case(
        422, body(interventions=[{"layer": "pool", "op": "clamp", "max": 1, "site": "grad_output"}]), says="objective"
    ),
    "many interventions": Case(422, body(interventions=[{"layer": "pool", "op": "zero"}] * 300)),
    "gradient without objective": Case(422, body(layers=["pool:grad_output"]), pointer="/layers/0", says="objective"),
    "objective without gradient": Case(422, body(objective={"kind": "sum"}), says="grad_output"),
    "unknown kind": Case(422, graded({"kind": "accuracy"}), pointer="/objective/kind"),
    "class out of range": Case(422, graded({"kind": "logit", "class": 10}), pointer="/objective", says="0 to 9"),
    "class of a sum": Case(422, graded({"kind": "sum", "class": 1}), pointer="/objective"),
    "target that is no distribution": Case(422, graded({"kind": "kl_div", "target": [1.0] * 10}), pointer="/objective"),
    "terms beside a class": Case(
        422, graded({"terms": [[1, 2]], "class": 1}), pointer="/objective", says="in place of"
    ),
    "term out of range": Case(422, graded({"terms": [[1, 2], [1, 10]]}), pointer="/objective", says="0 to 9"),
    "reduction of a logit": Case(422, graded({"reduction": "sum"}), pointer="/objective", says="no reduction"),
    "layer of a logit": Case(422, graded({"kind": "logit", "class": 1, "layer": "pool"}), pointer="/objective"),
    "objective of no layer": Case(422, graded({"kind": "layer", "layer": "nothing"}), pointer="/objective"),
    "objective before the gradient": Case(422, graded({"kind": "layer", "layer": "block1"}), says="runs later"),
    "verify without outputs": Case(422, body(verify=True, layers=["pool:input"]), pointer="/verify", says="output"),
    "verify beside interventions": Case(
        422, body(verify=True, interventions=[{"layer": "pool", "op": "zero"}]), pointer="/verify", says="without"
    ),
    # 422: names
    "empty name": Case(422, body(layers=[""]), pointer="/layers/0"),
    "near name": Case(422, body(layers=["block2.conv3"]), pointer="/layers/0", says="block2.conv"),
    "an attribute": Case(422, body(layers=["__class__"]), pointer="/layers/0"),
    "an attribute of a layer": Case(422, body(layers=["head.weight"]), pointer="/layers/0"),
    "an attribute as a site": Case(422, body(layers=["pool:__class__"]), pointer="/layers/0"),
    "a file": Case(422, body(layers=["../../etc/passwd"]), pointer="/layers/0"),
    "a line break": Case(422, body(layers=["pool\r\nX-Evil: 1"]), pointer="/layers/0", says=""),
    "a NUL in a name": Case(422, body(layers=["pool\0"]), pointer="/layers/0"),
    "a name of 1 MB": Case(422, body(layers=["Q" * 2**20]), pointer="/layers/0/layer"),
    "a pattern of stars": Case(422, body(layers=["*a" * 250]), pointer="/layers/0"),
    "50,000 of one unknown name": Case(422, body(layers=["block9"] * 50_000), pointer="/layers/0"),
    "no attention": Case(422, body(layers=["pool:attention"]), pointer="/layers/0", says="computes no attention"),
    # 422: inputs
    "no inputs": Case(422, {"json": {"layers": ["pool"]}}, says="dry_run"),
    "no body": Case(422, {"params": ONE}),
    "no image": Case(422, multipart(PART.format("request", REQUEST) + "--x--\n")),
    "an empty input": Case(422, body(inputs=[{}]), input=0, pointer="/inputs/0"),
    "two kinds of input": Case(422, body(inputs=[{**image(PNG), **tensor(ROW)}]), input=0),
    "a URL": Case(422, body(inputs=[{"url": "http://127.0.0.1/x.png"}]), input=0, says="'image'"),
    "a part of no bytes": Case(422, {"files": [("images", PNG), ("images", b"")], "params": ONE}, input=1),
    "not base64": Case(422, body(inputs=[{"image": "not base64!"}]), input=0, says="base64"),
    "an image of words": Case(422, body(inputs=[image(LONG.encode())]), input=0, says="JPEG"),
    "an image cut short": Case(422, raw(PNG[:200], "image/png", **ONE), input=0),
    "an SVG": Case(422, raw(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", **ONE), input=0),
    "a tensor of another shape": Case(422, body(inputs=[tensor(ROW[:1])]), input=0, says="[3, 32, 32]"),
    "a tensor too small for the model": Case(422, body(inputs=[tensor(np.zeros((3, 0, 32), np.float32))]), input=0),
    "two shapes of a layer's output": Case(
        422,
        body(resume="block1", inputs=[tensor(np.zeros((16, side, side), np.float32)) for side in (32, 24)]),
        input=1,
    ),
    "NaN in a tensor": Case(422, body(inputs=[tensor(ROW), tensor(spoiled())]), input=1, says="finite"),
    "NaN in a batch": Case(422, raw(npy(spoiled((3, 3, 32, 32))), "application/x-npy", **ONE), input=2),
    "unknown dtype": Case(422, body(inputs=[{"tensor": {"dtype": "object", "shape": [1], "data": ""}}]), input=0),
    "too few bytes": Case(
        422, body(inputs=[{"tensor": {"dtype": "float32", "shape": [3, 32, 32], "data": "AAAA"}}]), input=0
    ),
    "a huge shape": Case(
        422, body(inputs=[{"tensor": {"dtype": "float32", "shape": [2**39] * 8, "data": ""}}]), input=0
    ),
    "a negative shape": Case(
        422,
        body(inputs=[{"tensor": {"dtype": "float32", "shape": [-1], "data": ""}}]),
        pointer="/inputs/0/tensor/shape/0",
    ),
    "a text that is not UTF-8": Case(422, raw("käse".encode("latin-1"), "text/plain", **ONE), input=0, says="UTF-8"),
    "npy of pickles": Case(422, raw(npy(np.array([{}], object)), "application/x-npy", **ONE), input=0),
    "npy of no rows": Case(422, raw(npy(np.zeros((0, 3, 32, 32))), "application/x-npy", **ONE), input=0),
    "safetensors of two": Case(
        422, raw(safetensors_of(image=ROW, other=ROW), "application/x-safetensors", **ONE), input=0, says="image"
    ),
    "safetensors of words": Case(422, raw(b"\xff" * 100, "application/x-safetensors", **ONE), input=0),
    "a picture for a model of tensors": Case(422, body(model="gated", layers=["linear"]), input=0, says="float32 [4]"),
    "two requests": Case(422, {"files": [("request", REQUEST), ("request", REQUEST)]}),
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
    "a broken parameter": Case(422, raw(PNG, "image/png", layers="pool", normalize="x"), pointer="/normalize"),
    "dry_run": Case(422, {**body(), "params": {"dry_run": "perhaps"}}, says="'dry_run'"),
    **{
        f"X-Request-Timeout: {value}": Case(422, {**body(), "headers": {"x-request-timeout": value}})
        for value in ("-1", "nan", "soon")
    },
}
