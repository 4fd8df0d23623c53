"""API keys: who may do what, and what is open to all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Control, Json, configured, image, net, picture, problem

USER, ADMIN = {"x-api-key": "user-key"}, {"x-api-key": "admin-key"}
BODY: Json = {"layers": ["pool"], "pool": "mean", "inputs": [image(picture(1))]}
PROTECTED = (
    *(("GET", "/models"), ("GET", "/models/digits"), ("GET", "/models/digits/layers"), ("POST", "/extract")),
    *(("POST", "/models/lazy/load"), ("POST", "/models/lazy/unload"), ("GET", "/docs"), ("GET", "/openapi.json")),
    *(("GET", "/"), ("GET", "/nowhere"), ("POST", "//extract"), ("POST", "/extract/"), ("GET", "/livez/")),
    *(("GET", "//livez"), ("GET", "/LIVEZ"), ("GET", "/livez/../models"), ("GET", "/readyz%2f..%2fmodels")),
    *(("GET", "/%6codels"), ("OPTIONS", "/extract"), ("HEAD", "/models")),
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
    keys: tuple[dict[str, str], ...] = (
        {},
        {"x-api-key": ""},
        {"x-api-key": "user-ke"},
        {"x-api-key": "user-key2"},
        {"x-api-key": "USER-KEY"},
        {"x-api-key": "user-key, other-key"},
        {"authorization": "user-key"},
        {"authorization": "Basic user-key"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer user-key x"},
        {"authorization": "Bearer wrong", "x-api-key": "user-key"},
    )
    for headers in keys:
        reply = guarded.client.request(method, guarded.url + path, headers=headers)
        assert reply.headers["www-authenticate"] == 'Bearer realm="layertap"'
        if method != "HEAD":
            found = problem(reply, 401)
            assert "Authorization: Bearer KEY" in found["errors"][0]["hint"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "user-key"},
        {"x-api-key": "other-key"},
        {"authorization": "Bearer user-key"},
        {"authorization": "bearer   user-key"},
        {"authorization": "Basic x", "x-api-key": "user-key"},
        ADMIN,
    ],
)
def test_good_key(guarded: Live, headers: dict[str, str]) -> None:
    """A known key is good in either header."""
    assert guarded.client.post("/extract", json=BODY, headers=headers).status_code == 200
    assert guarded.client.get("/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", [b"\xff\xfe", "ключ".encode(), b"\x80"])
def test_strange_key(guarded: Live, key: bytes) -> None:
    """A key of any bytes is no more than a wrong one."""
    problem(guarded.client.get("/models", headers={b"x-api-key": key}), 401)
    problem(guarded.client.get("/models", headers={b"authorization": b"Bearer " + key}), 401)


def test_open(guarded: Live) -> None:
    """Whether the server lives and is ready may be asked without a key."""
    for path in ("/livez", "/readyz"):
        assert guarded.client.get(path).status_code == 200
        assert guarded.client.get(path, headers={"x-api-key": "wrong"}).status_code == 200


def test_admin(guarded: Live) -> None:
    """Only an administrator's key loads and unloads models."""
    for path in ("/models/lazy/load", "/models/lazy/unload"):
        assert "ADMIN_KEYS" in problem(guarded.client.post(path, headers=USER), 403)["errors"][0]["hint"]
    assert guarded.client.get("/models/lazy", headers=USER).json()["state"] == "available"
    assert guarded.client.post("/models/lazy/load", headers=ADMIN).json()["state"] == "ready"
    assert guarded.client.post("/models/lazy/unload", headers=ADMIN).json()["state"] == "available"
    problem(guarded.client.post("/models/nowhere/load", headers=USER), 403)


def test_bad_request_with_a_key(guarded: Live) -> None:
    """With a good key errors are as ever."""
    problem(guarded.client.post("/extract", json={}, headers=USER), 422)
    problem(guarded.client.get("/nowhere", headers=USER), 404)


def test_refused_before_its_body_is_read(guarded: Live) -> None:
    """Whoever has no key is not listened to."""
    reply = guarded.client.post("/extract", content=(b"x" * 10_000 for _ in range(10)))
    problem(reply, 401)


def test_without_keys(live: Live, control: Control) -> None:
    """Without any configured key, whoever reaches the server may do everything, whatever key is sent."""
    reply = live.client.post("/models/two/load", headers={"x-api-key": "any"})
    assert reply.status_code == 200
    control.check()


def test_admin_keys_alone(serve: Serve) -> None:
    """Keys of administrators guard the server as well where there are no others."""
    with serve(admin_keys="admin-key") as live:
        problem(live.client.get("/models"), 401)
        assert live.client.get("/models", headers=ADMIN).status_code == 200


def test_settings() -> None:
    """Keys are separated by commas, blanks around them do not count, and they are not shown."""
    settings = Settings(api_keys=" a ,b,, c", admin_keys=())
    assert settings.api_keys == ("a", "b", "c")
    assert settings.guarded
    assert "'a'" not in repr(settings)
    assert not Settings(api_keys=" , ").guarded
