"""A job whose server is killed meanwhile and started anew: it waits, goes on, and loses nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server import CACHE
from tests.service.bulk.conftest import read, start, write_pictures
from tests.service.cli.commands import Command
from tests.service.gated_server import wait_until

COUNT = 1000
LIMIT_S = 240


@contextmanager
def serve(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``layertap serve`` as a process, ready; killed with the block."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    environment = {**kept, "LAYERTAP_WORKERS": "0", "LAYERTAP_CACHE_DIR": str(CACHE)}
    words = [sys.executable, "-m", "layertap", "serve", "--port", str(port)]
    with log.open("ab") as stream, subprocess.Popen(words, env=environment, stderr=stream, stdout=stream) as server:
        try:
            wait_until(lambda: server.poll() is not None or is_ready(port))
            assert server.poll() is None, log.read_text()
            yield server
        finally:
            server.kill()


def is_ready(port: int) -> bool:
    """Whether a server on a port takes requests."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_server_is_restarted(command: Command, tmp_path: Path) -> None:
    """The job says that it waits, goes on with the new process, and gives the file of an uninterrupted run."""
    write_pictures(tmp_path / "source", COUNT)
    broken, whole, log = tmp_path / "broken.parquet", tmp_path / "whole.parquet", tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--layers", "pool", "--pool", "mean", "--url", f"http://127.0.0.1:{port}", "--out")
    with serve(port, log) as server:
        job = start("bulk", tmp_path / "source", *words, broken)
        parts = tmp_path / "broken.parquet.parts"
        wait_until(lambda: bool(list(parts.glob("part-*.parquet"))) or job.poll() is not None)
        server.kill()
        server.wait()
    assert job.poll() is None, job.communicate()
    assert job.stdout is not None
    assert b"waiting for http://127.0.0.1" in job.stdout.readline()
    assert not broken.exists()
    with serve(port, log):
        output, _ = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, output.decode()
        assert command("bulk", tmp_path / "source", *words, whole).status == 0
    assert broken.read_bytes() == whole.read_bytes()
    assert len(set(read(whole)["key"])) == COUNT
