"""Who asks behind proxies: what named ones say of clients is believed, what others say is not."""

from __future__ import annotations

import json
import secrets
from io import StringIO

import pytest
from pydantic import ValidationError

from layertap.service.settings import Settings
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.support import Json

KEY = {"x-api-key": "user-key"}


def logged_client(lines: StringIO, request_id: str) -> str:
    """Who asked, by the log."""

    def found() -> list[Json]:
        written = [json.loads(line) for line in lines.getvalue().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in written if line.get("request_id") == request_id]

    wait_until(lambda: bool(found()))
    return str(found()[0]["client"])


def test_served(serve: Serve, lines: StringIO) -> None:
    """Where the proxy is named the log has the last address that is none of its, and the peer's where it is not."""
    for proxy, client in {"127.0.0.0/8": "203.0.113.7", "10.0.0.0/8": "127.0.0.1"}.items():
        with serve(api_keys="user-key", trusted_proxies=proxy) as live:
            name = secrets.token_hex(4)
            fields = {"x-forwarded-for": "6.6.6.6, 203.0.113.7", "x-forwarded-prefix": "/evil", "x-request-id": name}
            assert "servers" not in live.client.get("/openapi.json", headers={**KEY, **fields}).json()
            assert logged_client(lines, name) == client


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
    ],
)
def test_refused(settings: Json, says: str) -> None:
    """Everybody is no proxy, names are not looked up, and without keys there is none."""
    with pytest.raises(ValidationError, match=says):
        Settings(**settings)
