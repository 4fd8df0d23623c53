"""``layertap serve`` with worker processes: its fork server is a copy of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from layertap.models.digits import spec as digits
from tests.service.gated_server import wait_until
from tests.service.load_server import process
from tests.service.server_process import descendants
from tests.service.support import raw

END_S = 20


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def list_sockets(pid: int) -> set[str]:
    opened = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    return {name for name in opened if name.startswith("socket:")}


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    """The copy holds none of the server's sockets; killed, another one takes its place; all processes end together."""
    request = raw(Path("examples/digit.png").read_bytes(), "image/png", layers="pool")
    with process([digits()], tmp_path, LAYERTAP_WORKERS="2") as server:
        good = httpx.post(f"{server.url}/extract", **request)
        assert good.status_code == 200
        before = descendants(server.running.pid)
        (copy,) = [pid for pid in before if read_parent(pid) == server.running.pid]
        assert len(before) == 4  # the copy, a host, and its two workers
        for pid in before:
            assert not list_sockets(pid) & list_sockets(server.running.pid)
        os.kill(copy, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{before[-1]}").exists())
        again = httpx.post(f"{server.url}/extract", timeout=60, **request)
        assert again.json()["features"] == good.json()["features"]
        after = descendants(server.running.pid)
        assert not set(after) & set(before)
        server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*before, *after)))
