"""A server in processes of its own, and what they have used of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.machine import TICK_S
from bench.startup import EXIT_S, HOST, LAYERTAP, free_port, status

SEED = 0
READY_S = 1200.0  # graphs are compiled the first time
TRY_S = 0.05
IDLE_S = 0.2  # this long without CPU time is idle
SETTLE_S = 20.0
OVERRIDDEN = ("LAYERTAP_CONFIG", "LAYERTAP_API_KEYS", "LAYERTAP_ADMIN_KEYS")
PARENT, GROUP, TIMES, BORN = 1, 2, slice(11, 15), 19  # fields of /proc/PID/stat, from the state on


@dataclass(frozen=True)
class Server:
    """A running server: its port, its first process, where it logs, and when it was started."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    begun: float = field(default_factory=time.perf_counter)

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far."""
        return get_cpu_seconds(self.process.pid)

    def memory_mib(self) -> float:
        """What all processes hold now."""
        return memory_mib(self.process.pid)

    def idle_cores(self, seconds: float = 1.0) -> float:
        """How many cores it keeps busy while nobody asks."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds

    def settle(self, cores: float = 0.0, seconds: float = SETTLE_S) -> bool:
        """Wait until it uses no more than that, after a load left work behind; whether it came to that in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.idle_cores(IDLE_S) <= cores + TICK_S / IDLE_S:
                return True
        return False

    def until(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> float:
        """Seconds from the start until a request is answered with 200; it is tried till then."""
        while time.perf_counter() < self.begun + READY_S:
            if self.process.poll() is not None:
                ended = f"the server ended while starting, with status {self.process.returncode}"
                raise SystemExit(f"{ended}:\n{self.log.read_text()}")
            if status(self.port, method, path, body, dict(headers or {})) == 200:
                return time.perf_counter() - self.begun
            time.sleep(TRY_S)
        raise SystemExit(f"the server did not answer {path} with 200 within {READY_S:g} s:\n{self.log.read_text()}")


@contextmanager
def running(command: Sequence[str], port: int, folder: Path) -> Iterator[Server]:
    """A process group of its own that ends with the block, whatever it has started meanwhile."""
    log = folder / "server.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment(), start_new_session=True)
    try:
        yield Server(port, process, log)
    finally:
        end(process)


@contextmanager
def serving(models: Sequence[str], folder: Path, *variables: str) -> Iterator[Server]:
    """A layertap server with these models of torchvision, ready and idle, that ends with the block.

    ``variables`` are such as ``LAYERTAP_WORKERS=0``.
    """
    port = free_port()
    with running(["env", *variables, *layertap(models, port, folder)], port, folder) as server:
        server.until("GET", "/readyz")
        if not server.settle():
            raise SystemExit(f"the server did not idle within {SETTLE_S:g} s")
        yield server


def layertap(models: Sequence[str], port: int, folder: Path, warm: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """What starts a server with these models, each with the same warm plans."""
    entry = {
        "weights": f"random:{SEED}",
        "device": os.environ.get("BENCH_DEVICE", "cpu"),
        "decode": os.environ.get("BENCH_DECODE", "exact"),
        "load": "startup",
        **({"warm": list(warm)} if warm else {}),
    }
    entries = [{"name": name, "source": f"torchvision:{name}", **entry} for name in models]
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump({"models": entries}))
    return [*LAYERTAP, "serve", "--host", HOST, "--port", str(port), "--config", str(config)]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process kindly, and then whatever is left of those it started."""
    known = family(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_S)
    known |= family(process.pid)
    for pid, stat in known.items():
        if read_stat(pid)[BORN] == stat[BORN]:  # still the same process
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def family(pid: int) -> dict[int, list[str]]:
    """The fields of ``/proc/PID/stat`` of a process, of its group, and of all that descend from those."""
    stats = {int(path.name): read_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [each for each, stat in stats.items() if each == pid or int(stat[GROUP]) == pid]
    for one in found:
        found += [each for each, stat in stats.items() if int(stat[PARENT]) == one and each not in found]
    return {each: stats[each] for each in found if each in stats}


def get_cpu_seconds(pid: int) -> float:
    """CPU seconds so far of a process and of all that came of it."""
    return sum(sum(map(int, stat[TIMES])) for stat in family(pid).values()) * TICK_S


def memory_mib(pid: int) -> float:
    """What a process and all that came of it hold: a page that several share counts once (proportional set size)."""
    return sum(_held_kib(each) for each in family(pid)) / 1024


def _environment() -> dict[str, str]:
    """What this process has, so that settings can be tried out, less what would keep requests away.

    The server ends at once: no balancer looks at it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OVERRIDDEN}
    return {"LAYERTAP_DRAIN_DELAY_S": "0", **kept}


def read_stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; zeros for a process that has gone meanwhile."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50


def _held_kib(pid: int) -> int:
    """Proportional set size; resident memory where a kernel does not tell it; 0 for a process that has gone."""
    for name, field_ in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(field_))
    return 0
