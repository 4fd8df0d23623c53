"""A server that is killed and started again while many inputs are embedded: nothing is lost, doubled or mixed up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import layertap_client as lt
from tests.server import CACHE
from tests.service.support import picture

PICTURES = [picture(seed) for seed in range(40)]
PATIENT = lt.RetryPolicy(patience_s=120)  # for the first start: there has been no answer yet
COUNT, KILLED_AT = 1200, (300, 700)


@contextmanager
def started(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process, which need not be ready yet."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    command = [sys.executable, "-m", "layertap", "serve", "--port", str(port)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment | {"LAYERTAP_CACHE_DIR": str(CACHE)}, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    """Killed twice in the middle, the server is waited for, and each vector is that of its own input."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ExitStack() as stack:
        client = stack.enter_context(lt.Client(f"http://127.0.0.1:{port}"))
        processes = [stack.enter_context(started(port, tmp_path / "log"))]

        def inputs() -> Iterator[bytes]:
            for number in range(COUNT):
                if number in KILLED_AT:
                    processes[-1].send_signal(signal.SIGKILL)
                    processes[-1].wait()
                    processes.append(stack.enter_context(started(port, tmp_path / "log")))
                yield PICTURES[number % len(PICTURES)]

        with lt.Client(client.url, retries=PATIENT) as first:
            expected = first.extract(PICTURES).array
        items = list(client.embed(inputs()))
    assert len(processes) == 3
    assert [each.index for each in items] == list(range(COUNT))
    assert [each.error for each in items] == [None] * COUNT
    vectors = np.stack([each.vector for each in items])
    np.testing.assert_allclose(vectors, expected[np.arange(COUNT) % len(PICTURES)], rtol=1e-4, atol=1e-5)
