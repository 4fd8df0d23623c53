"""A server process of a checkout, and its command line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.recorded.client import HOST, exchange
from tests.recorded.request import get

START_S, END_S, POLL_S = 540, 60, 0.2
LONGEST_LOG = 4000  # characters of what a server wrote that did not start
# One thread and one forward at a time, and no bound that depends on free memory: the same bits in every run.
FIXED = {
    "LAYERTAP_CPU_THREADS": "1",
    "LAYERTAP_REPLICAS": "1",
    "LAYERTAP_BATCH_MEMORY_BYTES": "1GiB",
    "LAYERTAP_MAX_LOADED_MODELS": "64",
    "LAYERTAP_DEADLINE_S": "300",
    "LAYERTAP_DRAIN_DELAY_S": "0",
    "LAYERTAP_LOG_LEVEL": "warning",
    "LAYERTAP_LOG_FORMAT": "text",
    "COLUMNS": "120",
    "TERM": "dumb",
    "NO_COLOR": "1",
}


class ServerError(Exception):
    """A server that does not start; says what it wrote."""


@dataclass(frozen=True)
class Checkout:
    """A working tree, and the Python that its layertap is installed in."""

    folder: Path
    python: Path

    @classmethod
    def at(cls, folder: Path) -> Checkout:
        """The working tree in a folder, with the environment that ``make setup`` builds there."""
        return cls(folder.absolute(), folder.absolute() / ".venv" / "bin" / "python")

    def command(self, *words: str) -> list[str]:
        """The words that run its layertap."""
        return [str(self.python), "-m", "layertap", *words]


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process without layertap's, and those settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    return {**inherited, **FIXED, **settings}


def run(checkout: Checkout, *words: str) -> tuple[int, str]:
    """Exit status and standard output of a command line."""
    completed = subprocess.run(
        checkout.command(*words),
        cwd=checkout.folder,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    return completed.returncode, completed.stdout


@contextmanager
def serve(checkout: Checkout, config: Path | None, settings: Mapping[str, str]) -> Iterator[int]:
    """Run a server of a checkout until the block ends; gives its port once it is ready."""
    port = _free_port()
    words = ["serve", "--host", HOST, "--port", str(port), *(["--config", str(config)] if config else [])]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as cache:
        process = subprocess.Popen(
            checkout.command(*words),
            cwd=checkout.folder,
            env=environment({"LAYERTAP_CACHE_DIR": cache, **settings}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait(process, port, settings.get("LAYERTAP_ROOT_PATH", ""))
            yield port
        except ServerError as error:
            log.seek(0)
            raise ServerError(f"{error}: {log.read().decode(errors='replace')[:LONGEST_LOG]}") from None
        finally:
            _end(process)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], port: int, prefix: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}")
        try:
            if exchange(port, get("", f"{prefix}/readyz")).status == 200:
                return
        except ConnectionError:
            pass
        time.sleep(POLL_S)
    raise ServerError("the server did not become ready")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
