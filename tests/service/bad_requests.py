"""Bad requests to ``POST /extract``, what is wrong with each, and what the answer has to say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from tests.service.support import (
    Array,
    Json,
    image,
    npy,
    picture,
    raw,
    safetensors_of,
    tensor,
)

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
    "cut short": Case(400, text(json.dumps(GOOD)[:-2])),
    "two documents": Case(400, text("{} {}")),
    "BOM": Case(400, text(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())),
    "UTF-16": Case(400, text(json.dumps(GOOD).encode("utf-16"))),
    "Latin-1": Case(400, text('{"layers": ["käse"]}'.encode("latin-1"))),
    "NUL": Case(400, text('{"layers": ["a\0b"]}')),
    "NaN": Case(400, text('{"layers": [NaN]}')),
    "Infinity": Case(400, text('{"layers": ["pool"], "normalize": -Infinity}')),
    "a number beyond all": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 400 + "}]}")),
    "a huge exponent": Case(400, text('{"layers": ["pool"], "normalize": 1e400}')),
    "5,000 digits": Case(400, text('{"layers": [{"layer": "pool", "call": ' + "9" * 5000 + "}]}")),
    "-5,000 digits behind a point": Case(422, text('{"layers": ["pool"], "normalize": -0.' + "9" * 5000 + "}")),
    "1e999": Case(400, text('{"layers": [{"layer": "pool", "call": 1e999}]}')),
    "lone surrogate": Case(400, text('{"layers": ["\\ud800"]}')),
    "lone surrogate as a key": Case(400, text('{"\\udfff": 1}')),
    "deeper than JSON may be": Case(400, text('{"layers": ' + "[" * 2000 + "]" * 2000 + "}"), says="not JSON"),
    "very deep": Case(400, text("[" * 100_000 + "]" * 100_000)),
    "very deep objects": Case(400, text('{"a":' * 100_000 + "1" + "}" * 100_000)),
    "very deep and never closed": Case(400, text("[" * 100_000)),
    "no boundary": Case(400, text("--x--", "multipart/form-data")),
    "another boundary": Case(400, multipart(PART.format("request", REQUEST) + "--x--", "y")),
    "boundary too long": Case(400, multipart("--x--", "y" * 5000)),
    "multipart cut short": Case(400, multipart(PART.format("request", REQUEST))),
    "multipart without names": Case(400, multipart("--x\nContent-Disposition: form-data\n\na\n--x--\n")),
    "multipart without headers": Case(400, multipart("--x\n\na\n--x--\n")),
    "multipart with a bad header": Case(400, multipart("--x\nNo header at all\n\na\n--x--\n")),
    "a request part that is no JSON": Case(400, multipart(PART.format("request", "{") + "--x--\n")),
    "a request part with a surrogate": Case(400, multipart(PART.format("request", '"\\ud800"') + "--x--\n")),
    "multipart of lines that end in LF": Case(400, text(FILE.replace("\r", "") + "--x--\n", FORM)),
    "multipart of an endless header": Case(400, text(f"--x\r\nX: {'a' * 500_000}", FORM)),
    "multipart of a long header": Case(400, text(FILE.replace("form-data", "a" * 500_000) + "--x--\r\n", FORM)),
    "multipart of many headers": Case(400, text("--x\r\n" + "X: a\r\n" * 50_000 + "\r\na\r\n--x--\r\n", FORM)),
    "multipart of many parameters": Case(400, text("--x\r\nContent-Disposition: " + "a=b;" * 99_999, FORM)),
    "multipart of boundaries": Case(400, text("--x\r\n" * 300_000, FORM)),
    "multipart with an empty boundary": Case(400, text(FILE + "--x--\r\n", "multipart/form-data; boundary=")),
    "very many brackets": Case(413, body(layers=[[]] * 500_001), says="500000"),
    "a deep request part": Case(400, multipart(PART.format("request", "[" * 100_000) + "--x--\n")),
    # 404, 405
    "unknown model": Case(404, body(model="digit"), says="'digits'"),
    "a model named like a file": Case(404, body(model="../../etc/passwd")),
    "a model named like an attribute": Case(404, body(model="__class__")),
    "a model without a name": Case(404, body(model="")),
    "two slashes": Case(404, body(), path="//extract"),
    "a slash too many": Case(404, body(), path="/extract/"),
    "unknown route": Case(404, body(), path="/nowhere"),
    "a route that climbs": Case(404, body(), path="/models/..%2f..%2fetc%2fpasswd/load"),
    "wrong method": Case(405, body(), path="/models"),
    # What may be said once
    "two formats": Case(422, {**body(), "params": {"format": ["json", "npy"]}}, says="'format' is given 2 times"),
    "dry and not dry": Case(422, {**body(), "params": {"dry_run": ["true", "false"]}}, says="given 2 times"),
    # 406
    "unknown format": Case(406, {**body(), "params": {"format": "exe"}}, says="safetensors"),
    "no format": Case(406, {**body(), "params": {"format": ""}}),
    "a format like an attribute": Case(406, {**body(), "params": {"format": "__class__"}}),
    "a format that is not offered": Case(406, {**body(), "params": {"format": "gif"}}),
    "unknown type": Case(406, {**body(), "headers": {"accept": "text/html"}}, says="application/json"),
    "nothing accepted": Case(406, {**body(), "headers": {"accept": "*/*;q=0"}}),
    "nonsense accepted": Case(406, {**body(), "headers": {"accept": b"\xff;;q=,/"}}),
    "two results as npy": Case(
        406, {**body(layers=["pool", "head"]), "params": {"format": "npy"}}, says="application/x-npz"
    ),
    "int8 as npy": Case(406, {**body(dtype="int8"), "params": {"format": "npy"}}),
    # 413
    "body announced": Case(413, raw(b"\0" * 2_000_001, "image/png", **ONE), says="2000001"),
    "body in chunks": Case(413, raw((b"\0" * 500_000 for _ in range(9)), "image/png", **ONE), says="2000000"),  # type: ignore[arg-type]
    "pixels": Case(413, body(inputs=[image(picture(size=(101, 100)))]), input=0, says="10100"),
    "resized pixels": Case(413, raw(picture(size=(1, 1300)), "image/png", **ONE), input=0, says="40000"),
    "JSON inputs": Case(413, body(inputs=[image(PNG)] * 5), says="5 inputs"),
    "multipart inputs": Case(413, {"files": [("images", PNG)] * 5, "params": ONE}, says="5"),
    "10,001 inputs": Case(413, body(inputs=[{"image": ""}] * 10_001), says="10001 inputs"),
    "1,001 parts": Case(413, text(FILE * 1001 + "--x--\r\n", FORM), says="at most 4 inputs"),
    "1,001 request parts": Case(
        413, text(FILE.replace("images", "request") * 1001 + "--x--\r\n", FORM), says="at most 4 inputs"
    ),
    "rows of a batch": Case(413, raw(npy(np.zeros((5, 3, 32, 32), np.float32)), "application/x-npy", **ONE), says="5"),
    "results": Case(413, body(layers=["*"]), says="8"),
    "distinct names in objects": Case(413, body(layers=[{"layer": f"#{number}"} for number in range(9)]), says="8"),
    "distinct names in a query": Case(
        413, raw(PNG, "image/png", layers=",".join(f"{number}{'#' * 99}" for number in range(9))), says="8"
    ),
    "distinct names": Case(413, body(layers=[f"block1.{number}" for number in range(50_000)]), says="8"),
    "predicted reply": Case(413, body(layers=["block1", "block2", "block1.*"]), says="400000"),
    "predicted reply, batch": Case(413, body(layers=["block1"], inputs=[image(PNG)] * 3), says="400000"),
    # 415
    "no type": Case(415, {"content": b"x"}, says="application/json"),
    "unknown type of body": Case(415, text("x", "text/html"), says="text/plain"),
    "npz": Case(415, raw(b"PK", "application/x-npz", **ONE), says="safetensors"),
    "a text of another charset": Case(415, raw(b"a cat", "text/plain; charset=utf-16", **ONE), says="UTF-8"),
    "a form": Case(415, text("layers=pool", "application/x-www-form-urlencoded")),
    "a pickle": Case(415, text("x", "application/octet-stream")),
    "rubbish as type": Case(415, text("x", "\xff/;;=")),
    "packed body": Case(415, {"content": b"x", "headers": {"content-encoding": "br"}}, says="uncompressed"),
    # 422: texts
    "a text for pictures": Case(422, body(inputs=[{"text": "a cat"}]), input=0, says="takes no text"),
    "a raw text for pictures": Case(422, raw(b"a cat", "text/plain", **ONE), input=0, says="pictures"),
    "tokens for pictures": Case(422, body(inputs=[{"tokens": [1, 2]}]), input=0, says="takes no text"),
    "no tokens": Case(422, body(inputs=[{"tokens": []}]), pointer="/inputs/0/tokens", says="whole numbers"),
    "a negative token": Case(422, body(inputs=[{"tokens": [1, -2]}]), pointer="/inputs/0/tokens", says="whole numbers"),
    "a token beyond 64 bits": Case(422, text('{"layers": ["pool"], "inputs": [{"tokens": [99999999999999999999]}]}')),
    "tokens as text": Case(422, body(inputs=[{"tokens": "a cat"}]), pointer="/inputs/0/tokens"),
    "very many tokens": Case(422, body(inputs=[{"tokens": [1] * 200_000}]), pointer="/inputs/0/tokens"),
    "a text and tokens": Case(422, body(inputs=[{"text": "a", "tokens": [1]}]), input=0, says="exactly one"),
    "a text that is a list": Case(422, body(inputs=[{"text": ["a"]}]), pointer="/inputs/0/text"),
    # 422: fields
    "not an object": Case(422, {"json": []}, says="object"),
    "null": Case(422, {"json": None}),
    "null for layers": Case(422, body(layers=None), pointer="/layers"),
    "no name among layers": Case(422, raw(PNG, "image/png", layers=""), pointer="/layers"),
    "empty layers": Case(422, body(layers=[]), pointer="/layers"),
    "layers of the wrong type": Case(422, body(layers="pool"), pointer="/layers"),
    "null among layers": Case(422, body(layers=["pool", None]), pointer="/layers/1"),
    "too many layers": Case(422, body(layers=["p"] * 50_001), pointer="/layers"),
    "unknown field": Case(422, body(laiers=1), pointer="/laiers", says="'laiers'"),
    "unknown field of a layer": Case(
        422, body(layers=[{"layer": "pool", "__class__": 1}]), pointer="/layers/0/__class__"
    ),
    "unknown field of an input": Case(422, body(inputs=[{"path": "/etc/passwd"}]), pointer="/inputs/0/path"),
    "a field with a slash": Case(422, body(**{"a/b~c": 1}), pointer="/a~1b~0c"),
    "a field of line breaks": Case(422, body(**{"a\r\nX-Evil: 1\0": 1})),
    "a long field": Case(422, body(**{LONG: 1})),
    "a long field of wide characters": Case(422, body(**{"\U0001f984" * 300: 1})),
    "many unknown fields": Case(422, body(**{f"field{number}": number for number in range(5000)})),
    "wrong pool": Case(422, body(pool="average"), pointer="/pool", says="'gem'"),
    "wrong dtype": Case(422, body(dtype="float64"), pointer="/dtype"),
    "wrong encoding": Case(422, body(encoding="hex"), pointer="/encoding"),
    "wrong normalize": Case(422, body(normalize="maybe"), pointer="/normalize"),
    "wrong on_error": Case(422, body(on_error="ignore"), pointer="/on_error"),
    "wrong model": Case(422, body(model=["digits"]), pointer="/model"),
    "long model": Case(422, body(model=LONG), pointer="/model"),
    "wrong call": Case(422, body(layers=[{"layer": "pool", "call": "all"}]), pointer="/layers/0/call"),
    "fractional call": Case(422, body(layers=[{"layer": "pool", "call": 0.5}]), pointer="/layers/0/call"),
    "huge call": Case(422, body(layers=[{"layer": "pool", "call": 2**62}]), pointer="/layers/0"),
    "call beyond 64 bits": Case(422, text('{"layers": [{"layer": "pool", "call": 99999999999999999999}]}')),
    "very negative channel": Case(
        422, body(layers=[{"layer": "pool", "channels": [-(2**40)]}]), pointer="/layers/0/channels/0"
    ),
    "huge channel": Case(422, body(layers=[{"layer": "pool", "channels": [2**62]}]), pointer="/layers/0/channels/0"),
    "boolean channel": Case(422, body(layers=[{"layer": "pool", "channels": ["0x"]}]), pointer="/layers/0/channels/0"),
    "wrong as": Case(422, body(layers=[{"layer": "pool", "as": "../x"}]), pointer="/layers/0/as"),
    "empty as": Case(422, body(layers=[{"layer": "pool", "as": ""}]), pointer="/layers/0/as"),
    # 422: statistics
    "unknown statistic": Case(
        422, body(layers=[{"layer": "pool", "stats": ["median"]}]), pointer="/layers/0/stats", says="nonfinite"
    ),
    "a statistic twice": Case(
        422, body(layers=[{"layer": "pool", "stats": ["mean", "mean"]}]), pointer="/layers/0/stats", says="once"
    ),
    "no statistic": Case(422, body(layers=[{"layer": "pool", "stats": []}]), pointer="/layers/0/stats"),
    "statistics as a word": Case(422, body(layers=[{"layer": "pool", "stats": "mean"}]), pointer="/layers/0/stats"),
    "statistics as a number": Case(422, body(layers=[{"layer": "pool", "stats": 1}]), pointer="/layers/0/stats"),
    "statistics of lists": Case(422, body(layers=[{"layer": "pool", "stats": [["mean"]]}]), pointer="/layers/0/stats"),
    "many statistics": Case(422, body(layers=[{"layer": "pool", "stats": ["mean"] * 50_000}]), says="once"),
    "statistics of everything": Case(422, body(stats=True), pointer="/stats"),
    "statistics of a pool": Case(
        422, body(layers=["pool", {"layer": "pool", "stats": True, "pool": "mean"}]), pointer="/layers/1", says="'pool'"
    ),
    "normalised statistics": Case(
        422, body(layers=[{"layer": "pool", "stats": True, "normalize": True}]), pointer="/layers/0", says="'normalize'"
    ),
    "statistics as int8": Case(
        422, body(layers=[{"layer": "pool", "stats": True, "dtype": "int8"}]), pointer="/layers/0", says="'dtype'"
    ),
    # 422: what changes and what is differentiated
    "nowhere to intervene": Case(422, body(interventions=[{"op": "zero"}]), pointer="/interventions/0"),
    "unknown op": Case(422, body(interventions=[{"layer": "pool", "op": "exec"}]), says="'zero', 'scale'"),
    "no op": Case(422, body(interventions=[{"layer": "pool"}]), pointer="/interventions/0/op"),
    "NaN by": Case(422, body(interventions=[{"layer": "pool", "op": "scale", "by": "nan"}])),
    "infinite value": Case(422, body(interventions=[{"layer": "pool", "op": "add", "value": "inf"}])),
    "negative std": Case(422, body(interventions=[{"layer": "pool", "op": "noise", "std": -1}])),
    "wrong parameter": Case(422, body(interventions=[{"layer": "pool", "op": "zero", "by": 2}]), says="takes no 'by'"),
    "missing parameter": Case(422, body(interventions=[{"layer": "pool", "op": "scale"}]), says="needs 'by'"),
    "unknown layer to change": Case(
        422, body(interventions=[{"layer": "poll", "op": "zero"}]), pointer="/interventions/0", says="pool"
    ),
    "channel to change": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "channels": [4096]}])),
    "region beyond": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "region": [0, 0, 999, 1]}])),
    "half a region": Case(422, body(interventions=[{"layer": "block1", "op": "zero", "region": [0, 0]}])),
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
    "class by name": Case(422, graded({"kind": "logit", "class": "cat"})),
    "class of a sum": Case(422, graded({"kind": "sum", "class": 1}), pointer="/objective"),
    "short target": Case(422, graded({"kind": "kl_div", "target": [1.0]}), pointer="/objective", says="10 classes"),
    "target that is no distribution": Case(422, graded({"kind": "kl_div", "target": [1.0] * 10}), pointer="/objective"),
    "target of a logit": Case(422, graded({"target": [0.1] * 10}), pointer="/objective", says="'mse'"),
    "terms beside a class": Case(
        422, graded({"terms": [[1, 2]], "class": 1}), pointer="/objective", says="in place of"
    ),
    "term out of range": Case(422, graded({"terms": [[1, 2], [1, 10]]}), pointer="/objective", says="0 to 9"),
    "terms of a divergence": Case(422, graded({"kind": "kl_div", "terms": [[1, 2]]}), pointer="/objective"),
    "terms of a sum": Case(422, graded({"kind": "sum", "terms": [[1, 2]]}), pointer="/objective"),
    "reduction of a logit": Case(422, graded({"reduction": "sum"}), pointer="/objective", says="no reduction"),
    "weight that is none": Case(422, graded({"terms": [["a", 2]]}), pointer="/objective/terms/0/0"),
    "term of a channel": Case(
        422, graded({"kind": "layer", "layer": "head", "terms": [[1, -11]]}), pointer="/objective", says="channel"
    ),
    "layer of a logit": Case(422, graded({"kind": "logit", "class": 1, "layer": "pool"}), pointer="/objective"),
    "objective of no layer": Case(422, graded({"kind": "layer", "layer": "nothing"}), pointer="/objective"),
    "objective before the gradient": Case(422, graded({"kind": "layer", "layer": "block1"}), says="runs later"),
    "channel of the objective": Case(422, graded({"kind": "layer", "layer": "head", "channel": 99999})),
    "verify": Case(422, body(verify="maybe"), pointer="/verify"),
    "verify without outputs": Case(422, body(verify=True, layers=["pool:input"]), pointer="/verify", says="output"),
    "verify beside interventions": Case(
        422, body(verify=True, interventions=[{"layer": "pool", "op": "zero"}]), pointer="/verify", says="without"
    ),
    "verify beside gradients": Case(
        422,
        body(verify=True, layers=["pool", "block3:grad_output"], objective={"kind": "sum"}),
        pointer="/verify",
        says="without",
    ),
    # 422: names
    "empty name": Case(422, body(layers=[""]), pointer="/layers/0"),
    "a name of spaces": Case(422, body(layers=["pool", " "]), pointer="/layers/1"),
    "near name": Case(422, body(layers=["block2.conv3"]), pointer="/layers/0", says="block2.conv"),
    "an attribute": Case(422, body(layers=["__class__"]), pointer="/layers/0"),
    "an attribute of a layer": Case(422, body(layers=["head.weight"]), pointer="/layers/0"),
    "an attribute of the model": Case(422, body(layers=[".weight"]), pointer="/layers/0"),
    "an attribute in a path": Case(422, body(layers=[".[__class__]"]), pointer="/layers/0"),
    "an attribute as a site": Case(422, body(layers=["pool:__class__"]), pointer="/layers/0"),
    "an attribute as a class": Case(422, body(layers=[{"type": "__class__"}]), pointer="/layers/0"),
    "a file": Case(422, body(layers=["../../etc/passwd"]), pointer="/layers/0"),
    "a line break": Case(422, body(layers=["pool\r\nX-Evil: 1"]), pointer="/layers/0", says=""),
    "a NUL in a name": Case(422, body(layers=["pool\0"]), pointer="/layers/0"),
    "wide characters": Case(422, body(layers=["\u202eloop\U0001f984"]), pointer="/layers/0"),
    "a name of 400": Case(422, body(layers=[LONG]), pointer="/layers/0"),
    "a name of 1 MB": Case(422, body(layers=["Q" * 2**20]), pointer="/layers/0/layer"),
    "a pattern of stars": Case(422, body(layers=["*a" * 250]), pointer="/layers/0"),
    "50,000 of one unknown name": Case(422, body(layers=["block9"] * 50_000), pointer="/layers/0"),
    "50,000 broken names": Case(422, body(layers=["#"] * 50_000), pointer="/layers/0"),
    "no attention": Case(422, body(layers=["pool:attention"]), pointer="/layers/0", says="computes no attention"),
    # 422: inputs
    "no inputs": Case(422, {"json": {"layers": ["pool"]}}, says="dry_run"),
    "no body": Case(422, {"params": ONE}),
    "no body and no layer": Case(422, {}, says="no inputs"),
    "no image": Case(422, multipart(PART.format("request", REQUEST) + "--x--\n")),
    "an empty input": Case(422, body(inputs=[{}]), input=0, pointer="/inputs/0"),
    "a null input": Case(422, body(inputs=[{"image": None}]), input=0, says="'tensor'"),
    "two kinds of input": Case(422, body(inputs=[{**image(PNG), **tensor(ROW)}]), input=0),
    "a URL": Case(422, body(inputs=[{"url": "http://127.0.0.1/x.png"}]), input=0, says="'image'"),
    "an image of no bytes": Case(422, body(inputs=[image(PNG), {"image": ""}]), input=1),
    "a raw image of no bytes": Case(422, raw(b"", "image/png", **ONE), input=0),
    "a part of no bytes": Case(422, {"files": [("images", PNG), ("images", b"")], "params": ONE}, input=1),
    "not base64": Case(422, body(inputs=[{"image": "not base64!"}]), input=0, says="base64"),
    "base64 without padding": Case(422, body(inputs=[{"image": "QQ"}]), input=0),
    "an image of words": Case(422, body(inputs=[image(LONG.encode())]), input=0, says="JPEG"),
    "an image cut short": Case(422, raw(PNG[:200], "image/png", **ONE), input=0),
    "an SVG": Case(422, raw(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", **ONE), input=0),
    "an EPS": Case(422, raw(b"%!PS-Adobe-3.0 EPSF-3.0\n", "image/eps", **ONE), input=0),
    "a tensor of another shape": Case(422, body(inputs=[tensor(ROW[:1])]), input=0, says="[3, 32, 32]"),
    "a tensor with a batch axis": Case(422, body(inputs=[tensor(ROW[None])]), input=0),
    "a tensor too small for the model": Case(422, body(inputs=[tensor(np.zeros((3, 0, 32), np.float32))]), input=0),
    "a scalar": Case(422, body(inputs=[tensor(np.zeros((), np.float32))]), input=0),
    "two shapes of a layer's output": Case(
        422,
        body(resume="block1", inputs=[tensor(np.zeros((16, side, side), np.float32)) for side in (32, 24)]),
        input=1,
    ),
    "NaN in a tensor": Case(422, body(inputs=[tensor(ROW), tensor(spoiled())]), input=1, says="finite"),
    "infinity in a tensor": Case(422, body(inputs=[tensor(spoiled(value=np.inf))]), input=0),
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
    "a shape beyond 64 bits": Case(422, body(inputs=[{"tensor": {"dtype": "int8", "shape": [1e30], "data": ""}}])),
    "a text that is not UTF-8": Case(422, raw("käse".encode("latin-1"), "text/plain", **ONE), input=0, says="UTF-8"),
    "npy of pickles": Case(422, raw(npy(np.array([{}], object)), "application/x-npy", **ONE), input=0),
    "npy of nothing": Case(422, raw(b"", "application/x-npy", **ONE), input=0),
    "npy of no rows": Case(422, raw(npy(np.zeros((0, 3, 32, 32))), "application/x-npy", **ONE), input=0),
    "safetensors of two": Case(
        422, raw(safetensors_of(image=ROW, other=ROW), "application/x-safetensors", **ONE), input=0, says="image"
    ),
    "safetensors of words": Case(422, raw(b"\xff" * 100, "application/x-safetensors", **ONE), input=0),
    "safetensors of none": Case(422, raw(safetensors.numpy.save({}), "application/x-safetensors", **ONE), input=0),
    "a picture for a model of tensors": Case(422, body(model="gated", layers=["linear"]), input=0, says="float32 [4]"),
    "inputs beside images": Case(422, {"files": [("images", PNG), ("request", json.dumps({**GOOD}))]}, says="'inputs'"),
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
    "an empty parameter": Case(422, raw(PNG, "image/png", layers=",,"), pointer="/layers"),
    "dry_run": Case(422, {**body(), "params": {"dry_run": "perhaps"}}, says="'dry_run'"),
    **{
        f"X-Request-Timeout: {value}": Case(422, {**body(), "headers": {"x-request-timeout": value}})
        for value in ("0", "-1", "nan", "inf", "soon", "")
    },
}
