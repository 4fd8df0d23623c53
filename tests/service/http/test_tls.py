"""TLS by files: real handshakes, connections that end without resets."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from layertap.models.errors import LayertapError
from layertap.service.cli.setup import check_certificate
from tests.service.certificates import Certificate, make_certificate
from tests.service.gated_server import TRIES, TRY_S, parse_response, wait_until
from tests.service.load_server import Process, process
from tests.service.support import Json, image, picture

BODY: Json = {"layers": ["block3"], "pool": "mean", "inputs": [image(picture(1))]}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """The one that the server begins with."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """``layertap serve`` with it."""
    variables = {"LAYERTAP_TLS_CERT": str(certificate.cert), "LAYERTAP_TLS_KEY": str(certificate.key)}
    folder = tmp_path_factory.mktemp("served")
    with process(None, folder, wait=False, LAYERTAP_WORKERS="0", **variables) as found:
        with httpx.Client(base_url=found.url, verify=certificate.trust()) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200)
        yield found


def connect(url: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection after its handshake."""
    address = httpx.URL(url)
    plain = socket.create_connection((address.host, address.port), timeout=TRIES * TRY_S)
    return context.wrap_socket(plain, server_hostname=address.host)


def read_reply(connection: ssl.SSLSocket) -> httpx.Response:
    """A whole reply; the server may listen for a while after it, for what else is sent."""
    data = b""
    while True:
        head, _, content = data.partition(b"\r\n\r\n")
        match = re.search(rb"content-length: (\d+)", head)
        if match and len(content) >= int(match[1]):
            return parse_response(data)
        part = connection.recv(2**16)
        assert part, data
        data += part


@pytest.mark.slow
def test_served(served: Process, certificate: Certificate) -> None:
    """Who trusts the certificate is answered by a small and by a large reply; the address says https."""
    assert served.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=served.url, verify=certificate.trust(), timeout=60) as client:
        assert client.post("/extract", json=BODY).status_code == 200
        body = {"layers": ["block1"], "inputs": [image(picture(1))] * 64}
        reply = client.post("/extract?format=npy", json=body)
        assert reply.status_code == 200
        assert len(reply.content) > 1_000_000


@pytest.mark.slow
def test_not_trusted(served: Process) -> None:
    """Who does not trust it, or speaks no TLS, gets no answer."""
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{served.url}/livez")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(served.url.replace("https", "http") + "/livez")


@pytest.mark.slow
def test_old_protocols(served: Process, certificate: Certificate) -> None:
    """TLS 1.2 goes with forward secrecy alone, and nothing older goes."""
    context = certificate.trust()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connect(served.url, context) as connection:
        cipher = connection.cipher()
        assert cipher is not None
        assert cipher[0].startswith("ECDHE-")
    context.set_ciphers("AES128-SHA:ECDHE-ECDSA-AES128-SHA")
    with pytest.raises(ssl.SSLError):
        connect(served.url, context)


@pytest.mark.slow
def test_closed(served: Process, certificate: Certificate) -> None:
    """A reply that ends a connection arrives whole, also where more was sent than the server reads."""
    data = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * 100_000
    with connect(served.url, certificate.trust()) as connection:
        connection.sendall(data)
        reply = read_reply(connection)
    assert reply.status_code == 413
    assert reply.headers["connection"] == "close"
    assert len(reply.content) == int(reply.headers["content-length"])


def encrypt(made: Certificate) -> None:
    """Put a password on a key."""
    plain = made.key.rename(made.key.with_suffix(".plain"))
    words = ["openssl", "pkey", "-in", str(plain), "-out", str(made.key), "-aes256", "-passout", "pass:secret"]
    subprocess.run(words, check=True, capture_output=True)


BREAKS: list[Callable[[Certificate], object]] = [
    lambda made: made.cert.unlink(),
    lambda made: made.key.unlink(),
    lambda made: made.cert.write_text("no certificate"),
    lambda made: shutil.copy(made.cert, made.key),
    encrypt,
]


@pytest.mark.parametrize("damage", BREAKS)
def test_bad_files(tmp_path: Path, damage: Callable[[Certificate], object]) -> None:
    """Files that are no certificate with its key are refused, and nobody is asked for a password."""
    made = make_certificate(tmp_path)
    check_certificate(str(made.cert), str(made.key))
    damage(made)
    with pytest.raises(LayertapError, match="LAYERTAP_TLS_CERT"):
        check_certificate(str(made.cert), str(made.key))
