"""``deploy/nginx/layertap.conf`` as it is, run by nginx before two servers: one at a port, one at a Unix socket."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import httpx
import numpy as np
import pytest
from PIL import Image

from layertap.models.digits import spec as digits
from tests.service.certificates import Certificate, make_certificate
from tests.service.gated_server import wait_until
from tests.service.load_server import END_S, ROOT, Process, process
from tests.service.support import Json, image, net, picture

pytestmark = pytest.mark.slow
EXAMPLE = ROOT / "deploy" / "nginx" / "layertap.conf"
KEY = {"x-api-key": "user-key"}
BODY: Json = {"layers": ["block3"], "pool": "mean", "inputs": [image(picture(1))]}
SETTINGS = {
    "LAYERTAP_ROOT_PATH": "/features",
    "LAYERTAP_API_KEYS": "user-key",
    "LAYERTAP_DRAIN_DELAY_S": "1",
    "LAYERTAP_WORKERS": "0",
}
MAIN = """
{user}
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/replies;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/layertap.conf;
}}
"""
LARGE = 30_000_000  # bytes
ASKED = 8  # so many times each server gets a request: nginx has them take their turns


@dataclass(frozen=True)
class Site:
    """nginx before its servers."""

    url: str
    certificate: Certificate
    first: Process
    second: Process

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        """One that connects from an address of this machine."""
        transport = httpx.HTTPTransport(verify=self.certificate.trust(), local_address=address)
        return httpx.Client(transport=transport, base_url=self.url, headers=KEY, timeout=120)

    def find_request(self, request_id: str) -> Json:
        """What the server that had a request logged of it."""

        def found() -> list[Json]:
            lines = [*self.first.logged(), *self.second.logged()]
            return [line for line in lines if line.get("request_id") == request_id]

        wait_until(lambda: bool(found()))
        return found()[0]


@contextmanager
def run_nginx(folder: Path, port: int, changes: dict[str, str]) -> Iterator[None]:
    """Run nginx with the example and what a place of its own has elsewhere, until the block ends."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        pytest.skip("there is no nginx")
    text = EXAMPLE.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "layertap.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    words = [program, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with (folder / "nginx.log").open("wb") as log, subprocess.Popen(words, stderr=log) as running:
        try:
            wait_until(lambda: running.poll() is not None or accepts(port))
            assert running.poll() is None, (folder / "nginx.log").read_text()
            yield
        finally:
            running.terminate()
            running.wait(END_S)


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def choose_port() -> int:
    """One that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both servers, ready, and nginx before them."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory()))  # short: a socket is in it
        certificate = make_certificate(folder, host="example.org")
        path = folder / "layertap.sock"
        places = [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
        models = (digits(), net("never", "Never", load="lazy"))
        first = opened.enter_context(
            process(models, places[0], wait=False, LAYERTAP_TRUSTED_PROXIES="127.0.0.1", **SETTINGS)
        )
        proxies = {"LAYERTAP_UDS": str(path), "LAYERTAP_TRUSTED_PROXIES": "unix"}
        second = opened.enter_context(process(models, places[1], wait=False, **proxies, **SETTINGS))
        wait_until(lambda: httpx.get(f"{first.url}/readyz").status_code == 200)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            wait_until(lambda: client.get("/readyz").status_code == 200)
        port = choose_port()
        changes = {
            "server 127.0.0.1:8000 ": f"server {httpx.URL(first.url).netloc.decode()} ",
            "# server 127.0.0.1:8001 ": f"server unix:{path} ",
            "listen 443 ssl http2;": f"listen 127.0.0.1:{port} ssl http2;",
            "client_header_timeout 15s;": "client_header_timeout 1s;",
            "/etc/ssl/example.org.pem": str(certificate.cert),
            "/etc/ssl/example.org.key": str(certificate.key),
        }
        opened.enter_context(run_nginx(folder, port, changes))
        yield Site(f"https://127.0.0.1:{port}", certificate, first, second)


def test_prefix(site: Site) -> None:
    """The pages, all that they load and the document are beneath the prefix, and nothing is elsewhere."""
    with site.client() as client:
        reply = client.get("/features")
        assert (reply.status_code, httpx.URL(reply.headers["location"]).path) == (308, "/features/")
        for path in ("/features/", "/features/docs"):
            page = client.get(path)
            assert page.status_code == 200
            parts = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
            loaded = [page.url.join(part) for part in parts if not part.startswith("data:")]
            assert len(loaded) >= 3
            for url in loaded:
                assert url.path.startswith("/features/")
                assert client.get(url).status_code == 200
        document = client.get("/features/openapi.json")
        assert document.json()["servers"] == [{"url": "/features"}]
        assert document.headers["content-encoding"] == "gzip"
        assert client.post("/features/extract", json=BODY).status_code == 200
        assert [client.get(path).status_code for path in ("/extract", "/features/metrics")] == [404, 404]
        assert client.get("/features/models", headers={"x-api-key": ""}).status_code == 401


def test_heads(site: Site) -> None:
    """A head that is too large gets a reply, and one that does not end is given up; no server hears of either."""
    request_id = {"x-request-id": "large-head"}
    with site.client() as client:
        assert client.get("/features/livez", headers={**request_id, "x-long": "a" * 9000}).status_code == 400
        assert client.get(f"/features/livez?{'a' * 9000}", headers=request_id).status_code == 414
        assert client.get("/features/livez", headers={**request_id, "x-long": "a" * 7000}).status_code == 200
    assert site.find_request("large-head")["path"] == "/livez"
    url = httpx.URL(site.url)
    context = site.certificate.trust()
    context.check_hostname = False
    with socket.create_connection((url.host, url.port), timeout=END_S) as plain, context.wrap_socket(plain) as slow:
        slow.sendall(b"GET /features/livez HTTP/1.1\r\nHost: example.org\r\nX-Request-Id: slow-head\r\n")
        assert b" 200 " not in slow.recv(2**16)
    assert not [line for each in (site.first, site.second) for line in each.logged() if "slow-head" in str(line)]


def test_http2(site: Site, tmp_path: Path) -> None:
    """A body of 30 MB goes through HTTP/2, and what comes back is what a server gives by itself."""
    curl = shutil.which("curl")
    if curl is None or "HTTP2" not in subprocess.run([curl, "-V"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("there is no curl that speaks HTTP/2")
    pixels = np.random.default_rng(0).integers(0, 256, (3170, 3170, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.bmp")
    assert (tmp_path / "large.bmp").stat().st_size > LARGE
    query = "extract?layers=block3&pool=mean&format=npy"
    words = [
        *(curl, "--silent", "--show-error", "--http2", "--cacert", str(site.certificate.cert), "--max-time", "120"),
        *("--header", "X-API-Key: user-key", "--header", "Content-Type: image/bmp", "--header", "Expect:"),
        *("--data-binary", f"@{tmp_path / 'large.bmp'}", "--output", str(tmp_path / "reply")),
        *("--write-out", "%{http_version} %{http_code}", f"{site.url}/features/{query}"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_S)
    assert (done.stdout, done.stderr) == ("2 200", "")
    data = (tmp_path / "large.bmp").read_bytes()
    headers = {**KEY, "content-type": "image/bmp"}
    direct = httpx.post(f"{site.first.url}/{query}", content=data, headers=headers, timeout=120)
    assert (tmp_path / "reply").read_bytes() == direct.content


def test_address(site: Site) -> None:
    """Both servers log who asked nginx, whatever that client writes of itself."""
    written = {"x-forwarded-for": "6.6.6.6"}
    names = [f"address-{number}" for number in range(ASKED)]
    with site.client("127.0.0.2") as client:
        for name in names:
            reply = client.get("/features/openapi.json", headers={**written, "x-request-id": name})
            assert reply.json()["servers"] == [{"url": "/features"}]
    assert {site.find_request(name)["client"] for name in names} == {"127.0.0.2"}
    for each in (site.first, site.second):
        assert any(line.get("request_id") in names for line in each.logged())


def test_refused(site: Site) -> None:
    """A model that no server can load is refused, and keeps no server from answering requests for others."""
    with site.client() as client:
        never = [client.post("/features/extract", json={**BODY, "model": "never"}) for _ in range(ASKED)]
        assert {reply.status_code for reply in never} == {503}
        assert {reply.headers["content-type"] for reply in never} == {"application/problem+json"}
        others = [client.post("/features/extract", json=BODY) for _ in range(ASKED)]
        assert {reply.status_code for reply in others} == {200}
    ids = {reply.headers["x-request-id"] for reply in others}
    logs = (site.first, site.second)
    wait_until(lambda: all(any(line.get("request_id") in ids for line in each.logged()) for each in logs))


def test_drain(site: Site) -> None:
    """A server that ends while clients ask costs none of them an answer: the other one has the rest."""
    ended = Event()

    def ask() -> list[int]:
        found = []
        with site.client() as client:
            last = False
            while not last:
                last = ended.is_set()
                found.append(client.post("/features/extract", json=BODY).status_code)
        return found

    with ThreadPoolExecutor(6) as pool:
        crowd = [pool.submit(ask) for _ in range(6)]
        try:
            site.first.running.send_signal(signal.SIGTERM)
            assert site.first.running.wait(END_S) == 0
        finally:
            ended.set()
        statuses = [status for each in crowd for status in each.result()]
    assert set(statuses) == {200}
    assert len(statuses) > 12


def test_start(site: Site, tmp_path: Path) -> None:
    """While a server loads the models of its start, the other one answers what is sent to it."""
    port = httpx.URL(site.first.url).port or 0
    late = net("digits", "GatedLoad", module="tests.service.slow_models", args={"gate": str(tmp_path / "never")})
    with process([late], tmp_path, wait=False, port=port, LAYERTAP_TRUSTED_PROXIES="127.0.0.1", **SETTINGS) as starting:
        with site.client() as client:
            statuses = {client.post("/features/extract", json=BODY).status_code for _ in range(ASKED)}
        assert statuses == {200}
        assert {line["status"] for line in starting.logged() if line.get("path") == "/extract"} == {503}
