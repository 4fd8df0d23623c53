"""Who asks behind proxies: what named ones say of clients is believed, what others say is not, and nothing crashes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from io import StringIO
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from layertap.service.http.forwarded import MAX_HOPS, TrustedProxies
from layertap.service.logs import JsonFormatter
from layertap.service.settings import ForwardedHeaders, Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.support import Json

PROXIES = ("10.0.0.0/8", "192.168.1.5", "fd00::/8")
NEAR = "10.0.0.1"  # a proxy that is named
KEY = {"x-api-key": "user-key"}


def trusted(*proxies: str, headers: ForwardedHeaders = "x-forwarded", **settings: Any) -> TrustedProxies:
    """What a server with these settings believes."""
    return TrustedProxies(
        Settings(trusted_proxies=",".join(proxies), forwarded_headers=headers, api_keys="user-key", **settings)
    )


def request(peer: str | None, *fields: tuple[str, str | bytes]) -> Scope:
    """A request from a peer with these header fields."""
    headers = [
        (name.encode(), value if isinstance(value, bytes) else value.encode("latin-1")) for name, value in fields
    ]
    client = None if peer is None else (peer, 1234)
    return {"type": "http", "client": client, "scheme": "http", "path": "/", "headers": headers}


def resolve(proxies: TrustedProxies, peer: str | None, *fields: tuple[str, str | bytes]) -> tuple[str | None, str, str]:
    """The client's address, scheme and prefix of a request."""
    scope = proxies.resolve(request(peer, *fields))
    return scope["client"] and scope["client"][0], scope["scheme"], scope.get("forwarded_prefix", "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (NEAR, "http", "")),
        ({"for": "203.0.113.7"}, ("203.0.113.7", "http", "")),
        ({"for": "203.0.113.7:4711", "proto": "https"}, ("203.0.113.7", "https", "")),
        ({"for": "2001:db8::7"}, ("2001:db8::7", "http", "")),
        ({"for": "[2001:db8::7]:4711", "proto": "HTTPS"}, ("2001:db8::7", "https", "")),
        ({"for": "::ffff:203.0.113.7"}, ("203.0.113.7", "http", "")),
        ({"for": "6.6.6.6, 203.0.113.7"}, ("203.0.113.7", "http", "")),  # what the client wrote itself
        ({"for": "203.0.113.7, 10.1.1.1", "proto": "https, http"}, ("203.0.113.7", "https", "")),
        ({"for": "203.0.113.7, 10.1.1.1, 192.168.1.5", "proto": "https"}, ("203.0.113.7", "https", "")),
        ({"for": "203.0.113.7, 192.168.1.6"}, ("192.168.1.6", "http", "")),  # nobody that is named
        ({"for": "10.9.9.9, 10.1.1.1"}, ("10.9.9.9", "http", "")),  # the client is of the network too
        ({"for": "unknown, 10.1.1.1"}, ("10.1.1.1", "http", "")),
        ({"for": "203.0.113.7, 10.1.1.1", "proto": "a, b, c"}, ("203.0.113.7", "http", "")),
        ({"proto": "https"}, (NEAR, "https", "")),
        ({"proto": "javascript"}, (NEAR, "http", "")),
        ({"prefix": "/features"}, (NEAR, "http", "/features")),
        ({"prefix": "/features/"}, (NEAR, "http", "/features")),
        ({"prefix": "//evil.example/x"}, (NEAR, "http", "")),
        ({"prefix": "/models"}, (NEAR, "http", "")),  # a path of the server's own
        ({"prefix": "https://evil.example"}, (NEAR, "http", "")),
        ({"prefix": '/a"><script>'}, (NEAR, "http", "")),
    ],
)
def test_x_forwarded(fields: dict[str, str], expected: tuple[str, str, str]) -> None:
    """Of ``X-Forwarded-…`` the client is the last address that is no proxy's, with the scheme that belongs to it."""
    sent = [(f"x-forwarded-{name}", value) for name, value in fields.items()]
    assert resolve(trusted(*PROXIES), NEAR, *sent) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for=203.0.113.7", ("203.0.113.7", "http")),
        ("For=203.0.113.7;Proto=https;by=10.0.0.1", ("203.0.113.7", "https")),
        ('for="[2001:db8:cafe::17]:4711"', ("2001:db8:cafe::17", "http")),  # these are examples of RFC 7239
        ('for="_gazonk"', (NEAR, "http")),
        ("for=192.0.2.43, for=198.51.100.17", ("198.51.100.17", "http")),
        ("for=192.0.2.43;proto=https, for=10.1.1.1;proto=http", ("192.0.2.43", "https")),
        ('for = "10.1.1.1"', (NEAR, "http")),  # no blanks there
        (r'for="203.0.113.7\"', (NEAR, "http")),
        (r'for="203\.0.113.7"', ("203.0.113.7", "http")),
        ('host="a,b;for=6.6.6.6";for=203.0.113.7', ("203.0.113.7", "http")),
        (" ; , ;for=203.0.113.7 ;", ("203.0.113.7", "http")),
    ],
)
def test_forwarded(text: str, expected: tuple[str, str]) -> None:
    """Of ``Forwarded`` the same, by the grammar of RFC 7239."""
    assert resolve(trusted(*PROXIES, headers="forwarded"), NEAR, ("forwarded", text))[:2] == expected


def test_one_kind_alone() -> None:
    """Only one kind is read: a proxy that writes it passes the other on as a client wrote it."""
    both = [("forwarded", "for=6.6.6.6"), ("x-forwarded-for", "203.0.113.7"), ("x-forwarded-prefix", "/evil")]
    assert resolve(trusted(*PROXIES), NEAR, *both) == ("203.0.113.7", "http", "/evil")
    assert resolve(trusted(*PROXIES, headers="forwarded"), NEAR, *both) == ("6.6.6.6", "http", "")


@pytest.mark.parametrize("peer", ["203.0.113.9", "192.168.1.6", "::1", "11.0.0.1", None])
def test_others(peer: str | None) -> None:
    """From anybody else they change nothing."""
    fields = [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-proto", "https"), ("x-forwarded-prefix", "/evil")]
    scope = request(peer, *fields, ("forwarded", "for=127.0.0.1"))
    for headers in ("x-forwarded", "forwarded"):
        assert trusted(*PROXIES, headers=headers).resolve(scope) is scope  # type: ignore[arg-type]
    assert TrustedProxies(Settings()).resolve(scope) is scope


def test_unix_socket(tmp_path: Any) -> None:
    """Who comes by the Unix socket has no address: such a proxy is named ``unix``."""
    field = ("x-forwarded-for", "203.0.113.7")
    proxies = trusted("unix", uds=tmp_path / "socket")
    assert resolve(proxies, None, field)[0] == "203.0.113.7"
    assert resolve(proxies, "127.0.0.1", field)[0] == "127.0.0.1"
    assert resolve(trusted(*PROXIES), None, field)[0] is None


def test_many_hops() -> None:
    """What stands before so many proxies is not looked at."""
    hops = ", ".join(["203.0.113.7", *["10.1.1.1"] * MAX_HOPS])
    assert resolve(trusted(*PROXIES), NEAR, ("x-forwarded-for", hops))[0] == "10.1.1.1"


ADDRESSES = st.one_of(
    st.ip_addresses(v=4, network="10.0.0.0/8"), st.ip_addresses(v=4), st.ip_addresses(v=6, network="2001:db8::/32")
)


@given(st.lists(ADDRESSES, min_size=1, max_size=6))
def test_as_uvicorn_has_it(hops: Sequence[IPv4Address | IPv6Address]) -> None:
    """Among chains of addresses the client is the one that uvicorn finds."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])

    field = ("x-forwarded-for", ", ".join(map(str, hops)))
    middleware: Any = ProxyHeadersMiddleware(app, ["10.0.0.0/8"])  # type: ignore[arg-type]
    asyncio.run(middleware(request(NEAR, field), None, None))
    assert seen == [resolve(trusted("10.0.0.0/8"), NEAR, field)[0]]


@given(st.lists(st.binary(max_size=60), max_size=4), st.sampled_from(["x-forwarded-for", "forwarded"]))
@example([b"," * 65_000], "x-forwarded-for")
@example([b" " * 65_000 + b"!"], "forwarded")
@example([b'for="' + b"\\" * 65_000], "forwarded")
@example([b"for=" + b"a" * 65_000 + b"="], "forwarded")
@example([b"for=10.0.0.1," * 5_000], "forwarded")
def test_hostile(values: list[bytes], name: str) -> None:
    """Whatever stands in these headers, the client is an address, and the scheme one of two."""
    proxies = trusted(*PROXIES, headers="forwarded" if name == "forwarded" else "x-forwarded")
    fields = [*((name, value) for value in values), *(("x-forwarded-proto", value) for value in values)]
    client, scheme, prefix = resolve(proxies, NEAR, *fields, *(("x-forwarded-prefix", value) for value in values))
    assert client is not None
    assert set(client) <= set("0123456789abcdef.:")
    assert scheme in ("http", "https")
    assert prefix == "" or prefix.startswith("/")


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What the server logs."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("layertap.access")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield stream
    log.setLevel(level)
    log.removeHandler(handler)


def logged_client(lines: StringIO, request_id: str) -> str:
    """Who asked, by the log."""

    def found() -> list[Json]:
        written = [json.loads(line) for line in lines.getvalue().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in written if line["request_id"] == request_id]

    wait_until(lambda: bool(found()))
    return str(found()[0]["client"])


def test_served(serve: Serve, lines: StringIO) -> None:
    """Where the proxy is named the log has the client's address and the document the prefix, and nowhere else."""
    headers = {**KEY, "x-forwarded-for": "6.6.6.6, 203.0.113.7", "x-forwarded-prefix": "/features"}

    def ask(live: Live, name: str) -> Any:
        return live.client.get("/openapi.json", headers={**headers, "x-request-id": name}).json().get("servers")

    with serve(api_keys="user-key", trusted_proxies="127.0.0.1") as live:
        assert ask(live, "named") == [{"url": "/features"}]
        assert live.client.get("/openapi.json").json().get("servers") is None  # of that request alone
    with serve(api_keys="user-key", trusted_proxies="10.0.0.0/8") as live:
        assert ask(live, "other") is None
    assert logged_client(lines, "named") == "203.0.113.7"
    assert logged_client(lines, "other") == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trusted_proxies": "10.0.0.0/8"}, "set LAYERTAP_API_KEYS"),  # else everybody would be an administrator
        ({"trusted_proxies": "proxy.example", "api_keys": "k"}, "is no address and no network"),
        ({"trusted_proxies": "10.0.0.1/8", "api_keys": "k"}, "is no address and no network"),
        ({"trusted_proxies": "*", "api_keys": "k"}, "is no address and no network"),
        ({"trusted_proxies": "0.0.0.0/0", "api_keys": "k"}, "everybody"),
        ({"trusted_proxies": "10.0.0.1, ::/0", "api_keys": "k"}, "everybody"),
        ({"trusted_proxies": "unix", "api_keys": "k"}, "nothing without UDS"),
        ({"trusted_proxies": ",", "api_keys": "k"}, "nothing between the commas"),
        ({"forwarded_headers": "via"}, "x-forwarded"),
    ],
)
def test_refused(settings: Json, says: str) -> None:
    """Everybody is no proxy, names are not looked up, and without keys there is none."""
    with pytest.raises(ValidationError, match=says):
        Settings(**settings)
