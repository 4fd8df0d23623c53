"""Proxies of the environment: none stands between a client and its own machine, and one that fails is named."""

from __future__ import annotations

import os
from typing import Any

import pytest

import layertap_client as lt
from tests.client.misbehaving_server import misbehaving, reply
from tests.server import Live
from tests.service.support import picture

ONCE = lt.RetryPolicy(attempts=0)
AWAY = "http://layertap.example:8000"
DEAD = "http://127.0.0.1:9"
UNUSABLE = [
    ("ALL_PROXY", "socks://127.0.0.1:1080"),
    ("all_proxy", "socks5://127.0.0.1:1080"),
    ("HTTPS_PROXY", "http://proxy:port"),
    ("NO_PROXY", "fe80::/10"),
]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("variable", "value"), [*UNUSABLE, ("HTTP_PROXY", DEAD)])
def test_own_machine(open_client: Any, live: Live, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """A server on this machine is asked directly, by whichever name, whatever the environment says of proxies."""
    monkeypatch.setenv(variable, value)
    for host in ("127.0.0.1", "localhost"):
        client = open_client(live.url.replace("127.0.0.1", host), retries=ONCE)
        assert client.extract(picture(), "head")["head"].shape == (1, 10)


@pytest.mark.parametrize(("variable", "value"), UNUSABLE)
def test_unusable(open_client: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """What httpx can't use is refused when the client is made, with the variable's name; the password stays unsaid."""
    monkeypatch.setenv(variable, value.replace("//127", "//user:secret@127"))
    with pytest.raises(lt.InputError, match=f"^{variable} can't be used: ") as caught:
        open_client(AWAY)
    assert "secret" not in str(caught.value)
    with pytest.raises((ValueError, ImportError)) as given:  # the caller's own choice is not blamed on the environment
        open_client(AWAY, proxy="socks://127.0.0.1:1080")
    assert not isinstance(given.value, lt.LayertapError)


def test_failing(open_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is not there, refuses, or sends elsewhere: the error names the variable."""
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    with pytest.raises(lt.ConnectionFailedError, match=r"layertap\.example.*\(by the proxy of HTTP_PROXY\)"):
        open_client(AWAY, retries=ONCE).models()
    for status, words in ((403, "perhaps the proxy of HTTP_PROXY"), (302, "check the URL and HTTP_PROXY")):
        with misbehaving(reply(status, b"<html>", content_type="text/html")) as proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            with pytest.raises(lt.LayertapError, match=words):
                open_client(AWAY, retries=ONCE).models()
            assert proxy.received[0].line.split()[1].startswith(AWAY)
    monkeypatch.setenv("NO_PROXY", "layertap.example")
    with pytest.raises(lt.ConnectionFailedError) as caught:
        open_client(AWAY, retries=ONCE).models()
    assert "PROXY" not in str(caught.value)


def test_certificates_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a proxy, certificates are still those that the environment names."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(FileNotFoundError):
        lt.Client("https://127.0.0.1:1")
