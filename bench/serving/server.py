"""A server in processes of its own, and what it has used of the machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.serving.plain import LAYER, SEED
from bench.startup import EXIT_S, HOST, LAYERTAP, free_port, status

READY_S = 1200.0  # graphs are compiled the first time
WARM = "-warm"  # behind the name of a model that has a compiled plan
TRY_S = 0.1
IDLE_S = 0.2  # this long without CPU time is idle
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
OVERRIDDEN = ("LAYERTAP_CONFIG", "LAYERTAP_API_KEYS", "LAYERTAP_ADMIN_KEYS")


@dataclass(frozen=True)
class Server:
    """A running server: its port, its first process and all that came of it."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far."""
        return sum(sum(map(int, _stat(pid)[11:15])) for pid in self._pids()) * TICK_S

    def forget_peak(self) -> None:
        """Count the peak from here."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """The most memory of each process, added up; what they share is counted in each."""
        return sum(_high_water_kib(pid) for pid in self._pids()) / 1024

    def settle(self) -> None:
        """Wait until the server idles: for work that a load left behind, or that it does unasked."""
        for _ in range(round(READY_S / IDLE_S)):
            before = self.cpu_s()
            time.sleep(IDLE_S)
            if self.cpu_s() - before <= TICK_S:
                return
        raise SystemExit(f"the server did not idle within {READY_S:g} s")

    def _pids(self) -> list[int]:
        """The first process and its descendants."""
        parents = {int(path.name): int(_stat(int(path.name))[1]) for path in Path("/proc").glob("[0-9]*")}
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found


@contextmanager
def serving(models: Sequence[str], folder: Path, *, warm: bool = False) -> Iterator[Server]:
    """A server with these models of torchvision, ready and idle, that ends with the block.

    With ``warm`` each of them also under another name, with a compiled plan.
    """
    config, log = folder / "models.yaml", folder / "server.log"
    entry = {"weights": f"random:{SEED}", "device": "cpu", "load": "startup"}
    entries = [{"name": name, "source": f"torchvision:{name}", **entry} for name in models]
    plans = [{"layers": [LAYER], "pool": "flatten", "compile": True}]
    entries += [{**each, "name": each["name"] + WARM, "warm": plans} for each in entries if warm]
    config.write_text(yaml.safe_dump({"models": entries}))
    port = free_port()
    command = [*LAYERTAP, "serve", "--host", HOST, "--port", str(port), "--config", str(config)]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment())
    try:
        _await(process, port, log)
        server = Server(port, process.pid)
        server.settle()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended while starting, with status {process.returncode}:\n{log.read_text()}")
        if status(port, "GET", "/readyz", None, {}) == 200:
            return
        time.sleep(TRY_S)
    raise SystemExit(f"the server was not ready within {READY_S:g} s")


def _environment() -> dict[str, str]:
    """What this process has, so that settings can be tried out, less what would keep requests away."""
    return {name: value for name, value in os.environ.items() if name not in OVERRIDDEN}


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; zeros for a process that has gone meanwhile."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50


def _high_water_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
