"""Every format of a reply, and what a client may say of it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, picture, post, send

PNG = picture(1)
FORMATS = {
    "json": "application/json",
    "npy": "application/x-npy",
    "npz": "application/x-npz",
    "safetensors": "application/x-safetensors",
}
ACCEPTED = {
    "anything": "*/*",
    "any application": "application/*",
    "npz before json": "application/json;q=0.5, application/x-npz",
    "json by quality": "application/json, application/x-npz;q=0.1",
    "npy or anything": "application/x-npy, */*;q=0.1",
    "empty": "",
    "upper case": "APPLICATION/X-NPY",
    "all but json": "*/*, application/json;q=0",
}
REFUSED = {
    "html": "text/html",
    "nothing": "*/*;q=0",
    "a picture": "image/png",
    "nonsense": ";;q=,/",
    "problem": "application/problem+json",
}
BAD = image(b"no picture")
MIXED = {"layers": ["head"], "on_error": "skip", "inputs": [BAD, image(PNG), {"image": "!"}, image(picture(2)), {}]}
HEADERS = {
    "request id": {"x-request-id": "my-own.id_1"},
    "a long request id": {"x-request-id": "x" * 400},
    "a request id of odd characters": {"x-request-id": 'a"b<c> d'},
    "gzip accepted": {"accept-encoding": "gzip, br, zstd"},
    "only gzip accepted": {"accept-encoding": "gzip;q=1, identity;q=0"},
    "a timeout": {"x-request-timeout": "250"},
    "a page of this machine": {"origin": "http://localhost:3000"},
    "same origin": {"sec-fetch-site": "same-origin"},
}


def requests() -> Iterator[Request]:
    """One picture each, to ``digits``, or several of which some are bad."""
    for name, media_type in FORMATS.items():
        for dtype in ("float32", "float16", "int8"):
            query: Json = {"layers": "head", "dtype": dtype}
            yield send(f"replies/{name} {dtype}", PNG, "image/png", format=name, **query)
        yield send(f"replies/accept {name}", PNG, "image/png", headers={"accept": media_type}, layers="head")
        several: Json = {"layers": "block1,block2,head", "pool": "mean"}
        yield send(f"replies/several as {name}", PNG, "image/png", format=name, **several)
        yield post(f"replies/skipped as {name}", MIXED, query={"format": name})
        yield send(f"replies/dry run as {name}", PNG, "image/png", layers="head", dry_run="true", format=name)
    for name, accepted in (ACCEPTED | REFUSED).items():
        yield send(f"replies/accept {name}", PNG, "image/png", headers={"accept": accepted}, layers="head")
    yield send("replies/format before accept", PNG, "image/png", headers={"accept": "text/html"}, format="npz")
    yield post("replies/all inputs bad", MIXED | {"inputs": [BAD, {}]})
    yield post("replies/many inputs bad", MIXED | {"inputs": [BAD] * 40 + [image(PNG)]})
    yield post(
        "replies/a result called skipped",
        {"layers": [{"layer": "head", "as": "skipped"}], "on_error": "skip", "inputs": [image(PNG)]},
        query={"format": "npz"},
    )
    for name, headers in HEADERS.items():
        yield send(f"replies/{name}", PNG, "image/png", headers=headers, layers="head")
