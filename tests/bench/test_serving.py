"""Servers beside a plain loop: what is made of figures, who is let into the comparison, what is left running."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from torchvision.models import MobileNet_V3_Small_Weights, mobilenet_v3_small

from bench import peers
from bench.peers.naive import app
from bench.serving.contenders import CONTENDERS, Contender, started
from bench.serving.loads import LOADS, Load
from bench.serving.plain import Plain
from bench.serving.report import related
from bench.serving.server import family, running
from tests.service.engine.processes.test_decoding_executor import has_ended
from tests.service.gated_server import wait_until

MODEL = "mobilenet_v3_small"
LOOP = {"per_s": 100.0, "cpu_ms": 10.0, "peak_mib": 500.0}
SERVER = {"per_s": 90.0, "cpu_ms": 12.5, "peak_mib": 700.0, "p50_ms": 8.0}
ANSWERING = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = sys.argv[2].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
for session in (False, True):
    subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=session)
time.sleep(600)
"""


def jpeg() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=95)
    return encoded.getvalue()


def forward(layers: tuple[str, ...], data: bytes) -> dict[str, np.ndarray]:
    """Each layer's mean over space, by nothing but torchvision."""
    torch.manual_seed(0)
    model = mobilenet_v3_small(weights=None).eval()
    kept: dict[str, np.ndarray] = {}
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(
            lambda module, inputs, output, layer=layer: kept.update({layer: output.numpy().mean((2, 3))[0]})
        )
    batch = MobileNet_V3_Small_Weights.DEFAULT.transforms()(Image.open(io.BytesIO(data)).convert("RGB"))[None]
    with torch.no_grad():
        model(batch)
    return kept


def test_beside_the_loop() -> None:
    """A server's figures are related to the loop's of the same round; what is no load stays as it is."""
    one = {"p50_ms": 3.0, "ratio": 1.5}
    found = related({"loop": LOOP, "server 16": SERVER, "one": one})
    assert found["server 16"] == {**SERVER, "ratio": 0.9, "beyond_cpu_ms": 2.5}
    assert (found["loop"], found["one"]) == (LOOP, one)
    assert related({"server 16": SERVER}) == {"server 16": SERVER}


@pytest.mark.parametrize(
    ("layer", "cut"), [("features.4", True), ("features.4", False), ("features.4.block.0.1", False)]
)
def test_plain(layer: str, cut: bool) -> None:
    """Truncated by hand or hooked, the loop's forward gives the layer's mean."""
    data = jpeg()
    found = Plain(MODEL, (layer,), cut=cut)([data, data])[layer]
    expected = forward((layer,), data)[layer]
    np.testing.assert_allclose(found.numpy(), [expected, expected], rtol=1e-4, atol=1e-6)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"bytes")
    return path


def answering(text: str) -> Contender:
    """A server that answers everything with the same words."""

    def command(load: Load, port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", ANSWERING, str(port), text]

    return Contender(command, lambda load, layers: "/", CONTENDERS["naive"].read)


@pytest.mark.slow
def test_right_vector_is_let_in(picture: Path, tmp_path: Path) -> None:
    contender = answering('{"avgpool": [1.0, 2.0002]}')
    with started(contender, LOADS["mobilenet"], picture, {"avgpool": [1.0, 2.0]}, tmp_path) as (server, figures):
        assert figures["deviation"] == pytest.approx(1e-4)
        assert figures["start_s"] > 0
        pid = server.process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("vector", ["[1.0, 2.01]", "[1.0, NaN]"])
def test_other_vectors_are_kept_out(vector: str, picture: Path, tmp_path: Path) -> None:
    contender = answering(f'{{"avgpool": {vector}}}')
    with (
        pytest.raises(SystemExit, match="vector"),
        started(contender, LOADS["mobilenet"], picture, {"avgpool": [1.0, 2.0]}, tmp_path),
    ):
        pass


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Children that ignore SIGTERM are ended too, in sessions of their own as well."""
    with running([sys.executable, "-c", PARENT], 0, tmp_path) as server:
        wait_until(lambda: server.log.read_text().count("up") == 2)
        pids = set(family(server.process.pid))
        assert len(pids) == 3
    wait_until(lambda: all(has_ended(pid) for pid in pids))


LOCK = Path(__file__).parents[2] / "requirements.lock"


@contextmanager
def naive(layers: tuple[str, ...]) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app(MODEL, layers), host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_naive_peer() -> None:
    """It answers what a plain forward gives, by default and for the layers that a request names."""
    data, layers = jpeg(), ("features.4.block.0.1", "avgpool")  # the first is overwritten in place
    expected = forward(layers, data)
    load = Load("", MODEL, (layers,))
    contender = CONTENDERS["naive"]
    with naive(("avgpool",)) as url:
        for path, wanted in (("/extract", ("avgpool",)), (contender.path(load, layers), layers)):
            reply = httpx.post(url + path, content=data, headers={"Content-Type": "image/jpeg"}, trust_env=False)
            vector = np.concatenate([expected[layer] for layer in wanted])
            np.testing.assert_allclose(contender.read(reply.content, wanted), vector, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.packages])
def test_peers_run_our_versions(name: str) -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", peers.requirements(name).read_text(), re.MULTILINE))
    for package in ("torch", "torchvision", "pillow", "numpy"):
        assert re.search(rf"^{package}=={re.escape(pinned[package])}[ ;]", LOCK.read_text(), re.MULTILINE)
    assert name in pinned
