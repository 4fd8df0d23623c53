"""A Ray cluster of one node, on the loopback interface alone, and what runs on it; ended whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import httpx
import yaml

from tests.server import CACHE
from tests.service.server_process import descendants

TOOLS = Path(sys.executable).parent
CPUS = 4  # that Ray gives away, whatever there are
STARTS, START_S = 5, 150  # Ray waits 15 seconds for its own processes, which can't be set: a busy machine takes longer
TRY_S = 0.5
READY_S = 240
STARTED = "Ray runtime started"
# A third of the time in which Ray is imported: an addition to jsonschema, which some tool of developers brings.
SLOW_IMPORT = "rfc3987_syntax.py"
OPTIONS = (
    *("--head", "--block", f"--num-cpus={CPUS}", "--num-gpus=0", "--object-store-memory=200000000"),
    *("--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"),
    *("--include-dashboard=false", "--include-log-monitor=false"),
)
PORTS = (  # those that Ray would take may be of others
    *("port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"),
    *("runtime-env-agent-port", "metrics-export-port"),
)
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what keeps Ray from taking another address than the loopback's
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # replicas and actors wait for all others by default
    "LAYERTAP_CACHE_DIR": str(CACHE),
}


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``url`` is where applications answer once there is one."""

    process: subprocess.Popen[bytes]
    address: str
    port: int
    environment: Mapping[str, str]
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def list_processes(self, title: str) -> list[int]:
        """The processes whose command line begins so."""
        return [pid for pid in descendants(self.process.pid) if _read_command(pid).startswith(title)]

    def deploy(self) -> None:
        """Have one replica, by the command and the file that the documentation names; wait until it answers."""
        application = {
            "name": "layertap",
            "import_path": "layertap.service.ray_app:build_app",
            "args": {"min_replicas": 1, "max_replicas": 1},
        }
        http = {"host": "127.0.0.1", "port": self.port}
        document = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(document))
        words = (TOOLS / "serve", "run", "--non-blocking", "--address", self.address, file)
        subprocess.run(words, env=self.environment, check=True, timeout=READY_S)
        wait(self.is_ready)

    def is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz").status_code == 200
        return False


def wait(come_true: Callable[[], bool], pause: float = TRY_S) -> None:
    """Wait until something has come true, for as long as a slow machine may need."""
    end = time.monotonic() + READY_S
    while not come_true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(pause)


@contextmanager
def run_cluster() -> Iterator[Cluster]:
    """A cluster until the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAYERTAP_", "RAY_"))}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:  # short: sockets
        folder = Path(name)
        (folder / "path").mkdir()
        (folder / "path" / SLOW_IMPORT).write_text("raise ImportError")
        path = {"PYTHONPATH": str(folder / "path"), "RAY_AUTH_TOKEN": token_hex(32)}
        environment = {**kept, **ENVIRONMENT, **path}
        process, ports = _start(folder, environment)
        try:
            yield Cluster(process, f"127.0.0.1:{ports[0]}", ports[-1], environment, folder)
        finally:
            _end(process)


def _start(folder: Path, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A cluster's process, and the ports that it was given; the last one is free."""
    log = folder / "log"
    for _ in range(STARTS):
        ports = _find_ports(len(PORTS) + 1)
        options = [f"--{name}={port}" for name, port in zip(PORTS, ports, strict=False)]
        command = [TOOLS / "ray", "start", *OPTIONS, *options, f"--temp-dir={folder}"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        end = time.monotonic() + START_S
        started: list[int] = []
        while process.poll() is None and time.monotonic() < end:
            if STARTED in log.read_text():
                return process, ports
            started = descendants(process.pid) or started
            time.sleep(TRY_S)
        _end(process, started)
    raise AssertionError(f"Ray did not start: {log.read_text()}")


def _end(process: subprocess.Popen[bytes], started: Sequence[int] = ()) -> None:
    """End a cluster, and all that it has started: nothing of it is to be kept."""
    for pid in [process.pid, *(descendants(process.pid) or started)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _find_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _read_command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
