"""Other servers: the same work as a plain forward, environments of their own, nothing left running."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

from bench import peers
from bench.peers.naive import app
from bench.serving.contenders import CONTENDERS
from bench.serving.loads import Load
from tests.bench.support import MODEL, forward, jpeg
from tests.service.gated_server import wait_until

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


# Peers' environments


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.packages])
def test_peers_run_our_versions(name: str) -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", peers.requirements(name).read_text(), re.MULTILINE))
    for package in ("torch", "torchvision", "pillow", "numpy"):
        assert re.search(rf"^{package}=={re.escape(pinned[package])}[ ;]", LOCK.read_text(), re.MULTILINE)
    assert name in pinned
