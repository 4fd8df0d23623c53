"""A server beneath a prefix: what it says of itself is true behind proxies that take the prefix off and that don't."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import httpx
import pytest
from pydantic import ValidationError
from starlette.routing import BaseRoute, Route

from layertap.service.app import create_app
from layertap.service.settings import ROUTES, Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.proxy import proxied
from tests.service.sockets import END, exchanged
from tests.service.support import Json, configured, image, picture, problem

PREFIX = "/features"
USER = {"x-api-key": "user-key"}
BODY: Json = {"layers": ["pool"], "pool": "mean", "inputs": [image(picture(1))]}


@pytest.fixture(scope="module")
def prefixed(serve: Serve) -> Iterator[Live]:
    """A server that knows its prefix."""
    with serve(root_path=PREFIX) as live:
        yield live


@pytest.fixture(scope="module")
def guarded(serve: Serve) -> Iterator[Live]:
    """One with a key."""
    with serve(root_path=PREFIX, api_keys="user-key") as live:
        yield live


@pytest.fixture(params=["taken off", "left on"])
def outside(request: pytest.FixtureRequest, prefixed: Live) -> Iterator[httpx.Client]:
    """A client on the other side of a proxy."""
    with (
        proxied(prefixed.url, PREFIX, strip=request.param == "taken off") as url,
        httpx.Client(base_url=url, timeout=60, verify=False) as client,
    ):
        yield client


def test_document(prefixed: Live, outside: httpx.Client) -> None:
    """Its document names the prefix, and whoever goes by it gets what the server gives directly."""
    document = outside.get(f"{PREFIX}/openapi.json").json()
    assert document["servers"] == [{"url": PREFIX}]
    (server,) = document["servers"]
    assert set(document["paths"]) >= {"/extract", "/models"}
    reply = outside.post(f"{server['url']}/extract", json=BODY)
    assert reply.status_code == 200
    direct = prefixed.client.post("/extract", json=BODY)
    assert reply.content == direct.content
    assert outside.get(f"{server['url']}/models/digits/layers?match=head").json()["layers"][0]["name"] == "head"
    problem(outside.get(f"{PREFIX}/nowhere"), 404)


def test_no_prefix(live: Live) -> None:
    """A server without one names none and answers beneath none."""
    assert "servers" not in live.client.get("/openapi.json").json()
    problem(live.client.post(f"{PREFIX}/extract", json=BODY), 404)
    assert 'src="ui/main.js"' in live.client.get("/").text  # relative: whatever path a proxy has put before it


SHUT = (
    *(b"/features/extract", b"/features/../extract", b"//features//extract", b"//features/extract", b"/features//"),
    *(b"/features//extract", b"/features/./extract", b"/features/livez/../models", b"/features//livez"),
    *(b"/features/features/livez", b"/featureslivez", b"/features%2f%2flivez", b"/features/livez/", b"/livez/features"),
    *(b"/features/livez%2f..%2fmodels", b"/FEATURES/livez", b"/features/LIVEZ", b"/features;/livez", b"/featur/livez"),
    *(b"/features/../features/models", b"/features/models?/livez", b"/features/models#/livez", b"/features\\livez"),
    *(b"http://livez/features/models", b"http://x/features//livez", b"/./features/livez", b"/features/%2elivez"),
    b"/features/ui/",
)


@pytest.mark.parametrize("target", SHUT)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_key_missing(guarded: Live, method: bytes, target: bytes) -> None:
    """However a path beneath a prefix is written, there is no way in without a key."""
    for fields in (b"Host: x", b"Host: localhost\r\nX-Forwarded-Prefix: /livez", b"Host: livez"):
        reply = exchanged(guarded, b"%b %b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (method, target, fields))
        assert reply.status_code in (400, 401)


def test_key(guarded: Live) -> None:
    """A key opens what stands there, with the prefix and without it, and nothing else; health asks for none."""
    for path in ("/extract", f"{PREFIX}/extract"):
        assert guarded.client.post(path, json=BODY, headers=USER).status_code == 200
    for path in (b"/features/../extract", b"//features//extract", b"/features/features/extract", b"/featuresextract"):
        reply = exchanged(guarded, b"POST %b HTTP/1.1\r\nX-API-Key: user-key\r\n" % path, END)
        problem(reply, 404)
    for path in ("/livez", "/readyz"):
        assert [guarded.client.get(each).status_code for each in (path, PREFIX + path)] == [200, 200]
    assert guarded.client.head(f"{PREFIX}/models", headers=USER).content == b""


def paths(routes: Sequence[BaseRoute]) -> Iterator[str]:
    """The paths of all routes, of those of included routers too, however FastAPI keeps them."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from paths(router.routes)
        elif isinstance(route, Route):
            yield route.path


def test_own_paths() -> None:
    """A prefix that is a path of this server too is refused, whatever follows: it would hide what stands there."""
    first = {path.split("/")[1] for path in paths(create_app(Settings(), configured()).routes)} - {""}
    assert first == ROUTES
    for name in first:
        for path in (f"/{name}", f"/{name}/v1"):
            with pytest.raises(ValidationError, match=f"/{name} is a path of the server's own"):
                Settings(root_path=path)
