"""API keys: who may do what, what is open to all, and what proxies say of who asks."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from pydantic import ValidationError

from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.sockets import END, exchanged
from tests.service.support import Json, configured, image, net, picture, problem
from tests.service.test_access_log import find

USER, ADMIN = {"x-api-key": "user-key"}, {"x-api-key": "admin-key"}
BODY: Json = {"layers": ["pool"], "pool": "mean", "inputs": [image(picture(1))]}
PROTECTED = (
    *(("GET", "/models"), ("GET", "/models/digits"), ("GET", "/models/digits/layers"), ("POST", "/extract")),
    *(("POST", "/models/lazy/load"), ("POST", "/models/lazy/unload"), ("POST", "/docs"), ("PUT", "/openapi.json")),
    *(("POST", "/"), ("GET", "/ui/"), ("GET", "/ui/../models"), ("GET", "//docs"), ("GET", "/nowhere")),
    *(("POST", "//extract"), ("POST", "/extract/"), ("GET", "/livez/")),
    *(("GET", "//livez"), ("GET", "/LIVEZ"), ("GET", "/livez/../models"), ("GET", "/readyz%2f..%2fmodels")),
    *(("GET", "/%6codels"), ("OPTIONS", "/extract"), ("HEAD", "/models"), ("GET", "/docs/")),
)


WRONG: tuple[dict[str | bytes, str | bytes], ...] = (
    *({}, {"x-api-key": ""}, {"x-api-key": "user-key2"}, {"x-api-key": "user-key, other-key"}),
    *({"authorization": "user-key"}, {"authorization": "Bearer user-key x"}),
    {"authorization": "Bearer wrong", "x-api-key": "user-key"},
    *({b"x-api-key": b"\xff\xfe"}, {b"authorization": b"Bearer \x80"}, {b"x-api-key": "ключ".encode()}),
)


@pytest.fixture(scope="module")
def guarded(serve: Serve) -> Iterator[Live]:
    """A server with keys."""
    configuration = configured(net("lazy", "Gated", load="lazy"))
    with serve(configuration, api_keys="user-key, other-key", admin_keys="admin-key") as live:
        yield live


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_key_missing(guarded: Live, method: str, path: str) -> None:
    """Without a key, or with a wrong one, there is no way in, by any spelling of a path."""
    for headers in WRONG:
        reply = guarded.client.request(method, guarded.url + path, headers=headers)
        assert reply.headers["www-authenticate"] == 'Bearer realm="layertap"'
        if method != "HEAD":
            found = problem(reply, 401)
            assert "Authorization: Bearer KEY" in found["errors"][0]["hint"]


TARGETS = (
    *(b"GET http://x/models", b"GET http://livez/models", b"GET http://x:y@livez/models", b"GET HTTP://[::1]/models"),
    *(b"GET http://x//livez", b"GET http://x/livez/../models", b"GET /livez/..;/models", b"GET /livez;/../models"),
    *(b"GET /livez%00", b"GET /livez%20", b"GET /livez%2f", b"GET /livez%3f", b"GET /models?/livez", b"GET ///livez"),
    *(b"GET /.//livez", b"GET /./livez", b"GET /livez/.", b"GET \\livez", b"OPTIONS *", b"GET /models#/livez"),
    *(b"POST http://x/extract", b"POST /extract#/livez", b"DELETE /models/digits", b"TRACE /models", b"PROPFIND /"),
)
FIELDS = (
    *(b"Host: x", b"Host: livez", b"Host: 127.0.0.1/livez", b"Host:", b"Host: a\r\nHost: b", b"X: no host at all"),
    *(b"Host: localhost\r\nX-Forwarded-For: 127.0.0.1", b"Host: localhost\r\nX-Original-URL: /livez"),
    *(b"Host: localhost\r\nX-Rewrite-URL: /livez", b"Host: localhost\r\nX-Forwarded-Prefix: /livez"),
    *(b"Host: localhost\r\nX-HTTP-Method-Override: GET", b"Host: localhost\r\nForwarded: for=127.0.0.1;host=localhost"),
)


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_without_a_key(guarded: Live, target: bytes) -> None:
    """However a request's target is written, and whatever its head says of hosts, there is no way in without a key."""
    for fields in FIELDS:
        reply = exchanged(guarded, b"%b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (target, fields))
        assert reply.status_code in (400, 401)
        assert reply.text == "Invalid HTTP request received." or problem(reply, reply.status_code)


def test_every_route_asks_for_a_key(guarded: Live) -> None:
    """Of all routes that there are, two are open, beside pages, which are the same everywhere."""
    document = guarded.client.get("/openapi.json", headers=USER).json()
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    asked = listed | {("GET", path) for path in ("/", "/docs", "/openapi.json", "/metrics", "/redoc")}
    assert len(listed) >= 8
    closed = {(method, path) for method, path in asked if guarded.client.request(method, path).status_code == 401}
    assert asked - closed == {("GET", path) for path in ("/livez", "/readyz", "/", "/docs", "/openapi.json")}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "user-key"},
        {"authorization": "bearer   user-key"},
        {"authorization": "Basic x", "x-api-key": "user-key"},
        ADMIN,
    ],
)
def test_good_key(guarded: Live, headers: dict[str, str]) -> None:
    """A known key is good in either header."""
    assert guarded.client.post("/extract", json=BODY, headers=headers).status_code == 200
    assert guarded.client.get("/models", headers=headers).status_code == 200


def test_admin(guarded: Live) -> None:
    """Only an administrator's key loads and unloads models."""
    for path in ("/models/lazy/load", "/models/lazy/unload", "/models/nowhere/load"):
        assert "ADMIN_KEYS" in problem(guarded.client.post(path, headers=USER), 403)["errors"][0]["hint"]
    assert guarded.client.get("/models/lazy", headers=USER).json()["state"] == "available"
    assert guarded.client.post("/models/lazy/load", headers=ADMIN).json()["state"] == "ready"
    assert guarded.client.post("/models/lazy/unload", headers=ADMIN).json()["state"] == "available"


def test_admin_keys_alone(serve: Serve) -> None:
    """Keys of administrators guard the server as well where there are no others."""
    with serve(admin_keys="admin-key") as live:
        problem(live.client.get("/models"), 401)
        assert live.client.get("/models", headers=ADMIN).status_code == 200


def test_keys_in_a_file(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may stand in a file, one a line, beside those of the environment; of any letters.

    A file that is named and holds no key is an error, and never means that none is asked for.
    """
    keys = tmp_path / "keys"
    keys.write_bytes("\ufefffirst-key\r\n\n  second-key \nthird,key\nключ\n".encode())
    with serve(api_keys="user-key", api_keys_file=keys) as live:
        problem(live.client.get("/models"), 401)
        for key in ("first-key", "second-key", "third,key", "user-key", "ключ"):
            assert live.client.get("/models", headers={b"x-api-key": key.encode()}).status_code == 200
        for key in ("first-key,second-key", "third", "key", str(keys), "", ",", "first-key\u2028"):
            problem(live.client.get("/models", headers={b"x-api-key": key.encode()}), 401)
        problem(live.client.post("/models/digits/unload", headers={"x-api-key": "first-key"}), 403)
    monkeypatch.setenv("LAYERTAP_ADMIN_KEYS_FILE", str(keys))
    assert Settings().admin_keys == ("first-key", "second-key", "third,key", "ключ")
    assert Settings().requires_key
    assert "first-key" not in repr(Settings())
    (empty := tmp_path / "empty").write_text(" \n\n")
    with pytest.raises(ValidationError, match="no key in"):
        Settings(api_keys_file=empty)
    with pytest.raises(ValidationError, match="nowhere: No such file"):
        Settings(api_keys_file=tmp_path / "nowhere")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example", "http://[", ""])
def test_pages_of_other_sites(live: Live, origin: str) -> None:
    """Where no key is asked for, pages of other sites that this machine's browser shows use nothing of it."""
    told = problem(live.client.post("/models/two/unload", headers={"origin": origin}), 403)
    assert ("another site" in told["detail"], "LAYERTAP_CORS_ORIGINS" in told["hint"]) == (True, True)
    said = {"origin": origin, "sec-fetch-site": "cross-site"}
    for method, path in (("POST", "/models/two/unload"), ("GET", "/models/two/layers"), ("POST", "/extract")):
        assert "another site" in problem(live.client.request(method, path, headers=said), 403)["detail"]
    assert live.client.get("/readyz", headers=said).status_code == 200
    own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-site"}
    assert live.client.post("/models/two/load", headers=own).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "x@localhost", "localhost/x", "[", ""]
)
def test_names_that_lead_here(live: Live, host: str) -> None:
    """Where no key is asked for, a page whose name was made to lead to this machine uses nothing of it."""
    for method, path in (("GET", "/models"), ("POST", "/extract"), ("POST", "/models/two/unload")):
        found = problem(live.client.request(method, path, headers={"host": host}), 403)
        assert "LAYERTAP_ALLOWED_HOSTS" in found["hint"]
    assert live.client.get("/readyz", headers={"host": host}).status_code == 200
    assert exchanged(live, b"GET /models HTTP/1.1\r\nHost: %b\r\n" % host.encode(), END).status_code == 400  # has two
    for own in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1", "localhost."):
        assert live.client.get("/models", headers={"host": own}).status_code == 200
    twice = b"GET /models HTTP/1.1\r\nHost: localhost\r\nHost: %b\r\n" % host.encode()
    assert exchanged(live, twice, END).status_code == 400


def test_names_and_origins(serve: Serve) -> None:
    """A server may have further names, and pages of other origins; no other page reads anything."""
    names = {"allowed_hosts": "Features.example", "cors_origins": "https://Page.example"}
    with serve(**names) as live:
        page = {"origin": "https://page.example", "sec-fetch-site": "cross-site", "host": "features.example:8000"}
        reply = live.client.post("/extract", json=BODY, headers=page)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert "x-layertap-fingerprint" in reply.headers["access-control-expose-headers"].lower()
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
        preflight = live.client.options("/extract", headers={**page, **asked})
        assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (200, "x-api-key")
        own = {"origin": "http://features.example:8000", "host": "features.example:8000"}
        assert live.client.post("/models/digits/load", headers=own).status_code == 200
        other = {**page, "origin": "https://other.example"}
        refused = live.client.post("/extract", json=BODY, headers=other)
        problem(refused, 403)
        assert "access-control-allow-origin" not in refused.headers
        assert live.client.options("/extract", headers={**other, **asked}).status_code == 400


def test_trusted_proxies(serve: Serve, lines: StringIO) -> None:
    """Where the proxy is named the log has the last address that is none of its, and the peer's where it is not."""
    for proxy, client in {"127.0.0.0/8": "203.0.113.7", "10.0.0.0/8": "127.0.0.1"}.items():
        with serve(api_keys="user-key", trusted_proxies=proxy) as live:
            fields = {"x-forwarded-for": "6.6.6.6, 203.0.113.7", "x-forwarded-prefix": "/evil"}
            reply = live.client.get("/openapi.json", headers={**USER, **fields})
            assert "servers" not in reply.json()
            assert find(lines, reply)["client"] == client


NO_SETTINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # what it is, what it says, and what is none
    ("cors_origins", "is no origin", ("page.example",)),
    ("allowed_hosts", "is no host's name", ("mybox:8000", "http://mybox", "*", "*.example")),
    ("trusted_proxies", "is no address and no network", ("proxy.example", "10.0.0.1/8", "*")),
    ("trusted_proxies", "everybody", ("0.0.0.0/0", "10.0.0.1, ::/0")),
    ("trusted_proxies", "nothing without UDS", ("unix",)),
    ("trusted_proxies", "nothing between the commas", (",",)),
    (
        "root_path",
        "'/features'",
        ("features", "/", "/features/", "/a//b", "/a?b", "/a#b", "/a/../b", "/a b", "/ä", "/%41"),
    ),
)


@pytest.mark.parametrize(("name", "says", "values"), NO_SETTINGS)
def test_settings(name: str, says: str, values: tuple[str, ...]) -> None:
    """Who may ask, and where, is told by plain names: everybody is no proxy, and names are not looked up."""
    for value in values:
        with pytest.raises(ValidationError, match=says):
            Settings(api_keys="k", **{name: value})
    with pytest.raises(ValidationError, match="set LAYERTAP_API_KEYS"):  # else everybody would be an administrator
        Settings(trusted_proxies="10.0.0.0/8")
    assert Settings(allowed_hosts="[fd00::1],MyBox").allowed_hosts == ("fd00::1", "mybox")
