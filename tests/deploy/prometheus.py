"""A real Prometheus on loopback, where there is one: it scrapes a server, and is asked by its own interface."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.gated_server import wait_until

END_S = 30


def find_tool(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``; the test is left out, visibly, where there is none."""
    return shutil.which(name) or pytest.skip(f"there is no {name}: Debian's package prometheus has it")


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    client: httpx.Client

    def ask(self, path: str, **parameters: str) -> Any:
        """What its interface answers."""
        reply = self.client.get(f"/api/v1/{path}", params=parameters)
        assert reply.status_code == 200, (parameters, reply.text)
        return reply.json()["data"]

    def query(self, expression: str) -> list[Any]:
        """The result of an expression now."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def list_firing(self) -> set[str]:
        """The alarms that are raised."""
        return {each["labels"]["alertname"] for each in self.ask("alerts")["alerts"] if each["state"] == "firing"}


@contextmanager
def running(config: Path, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with a configuration, ready, its data in a folder, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = {"config.file": config, "storage.tsdb.path": folder / "data", "web.listen-address": address}
    words = [find_tool("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    with (
        (folder / "prometheus.log").open("wb") as log,
        subprocess.Popen(words, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://{address}", timeout=60) as client,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                return client.get("/-/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready)
            yield Prometheus(client)
        finally:
            process.terminate()
            process.wait(END_S)
