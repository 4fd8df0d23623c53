"""A server in a process of its own, and what the system says of that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from urllib.request import urlopen

import httpx

from layertap.models.spec import ModelSpec
from tests.service.gated_server import wait_until
from tests.service.server_process import descendants
from tests.service.support import Json

ROOT = Path(__file__).parents[2]
# Small forwards, so that requests are cut in many places; so much time that a slow machine is not too slow. No balancer
# looks whether it is ready.
SETTINGS = {
    "LAYERTAP_MAX_BATCH_ROWS": "8",
    "LAYERTAP_DEADLINE_S": "120",
    "LAYERTAP_BODY_TIMEOUT_S": "120",
    "LAYERTAP_DRAIN_DELAY_S": "0",
    "LAYERTAP_LOG_FORMAT": "json",
}
STARTED = "listening on "
END_S = 120


@dataclass(frozen=True)
class Usage:
    """What a server holds: threads and descriptors of its own process, memory of each of its processes in bytes."""

    threads: int
    descriptors: int
    memory: Mapping[int, int]


def measure_memory(pid: int) -> int:
    """A process's part of its anonymous memory, in bytes: a page that several share counts once in their sum.

    Pages of files, torch's libraries above all, are shared with whatever other tests run just then.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


@dataclass(frozen=True)
class Process:
    """A running server, its log, and what else it prints."""

    running: subprocess.Popen[bytes]
    log: Path
    out: Path

    @cached_property
    def url(self) -> str:
        """Where it listens, once it does."""
        return next(line["message"].split()[2] for line in self.logged() if line["message"].startswith(STARTED))

    def logged(self) -> list[Json]:
        """Every whole line of its log."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def usage(self) -> Usage:
        """What it holds now."""
        own = Path("/proc") / str(self.running.pid)
        status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
        descriptors = len(list((own / "fd").iterdir()))
        processes = [self.running.pid, *descendants(self.running.pid)]
        return Usage(int(status["Threads"]), descriptors, {pid: measure_memory(pid) for pid in processes})

    def hooks(self) -> dict[str, int]:
        """The hooks that are on each model."""
        models = self._get("/models")["models"]
        assert [model["state"] for model in models] == ["ready"] * len(models), models
        return {model["name"]: model["hooks"] for model in models}

    def end(self) -> int:
        """Ask it to end; its exit status."""
        self.running.send_signal(signal.SIGTERM)
        return self.running.wait(END_S)

    def _get(self, path: str) -> Json:
        with urlopen(self.url + path, timeout=END_S) as reply:
            found: Json = json.load(reply)
        return found


@contextmanager
def process(
    specs: Iterable[ModelSpec] | None,
    folder: Path,
    *,
    wait: bool = True,
    before: tuple[str, ...] = (),
    port: int = 0,
    **variables: str,
) -> Iterator[Process]:
    """``layertap serve`` with some models, or the embedded ones, by default on a free port and ready."""
    config, log, out = folder / "models.json", folder / "log", folder / "out"
    words = [*before, sys.executable, "-m", "layertap", "serve", "--port", str(port)]
    if specs is not None:
        config.write_text(json.dumps({"models": [asdict(spec) for spec in specs]}))
        words += ["--config", str(config)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "LAYERTAP_CACHE_DIR": str(folder / "cache")}
    environment = os.environ | SETTINGS | own | variables
    started = partial(subprocess.Popen[bytes], words, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    with log.open("wb") as stream, out.open("wb") as printed, started(stderr=stream, stdout=printed) as running:
        try:
            found = Process(running, log, out)
            wait_until(
                lambda: (
                    running.poll() is not None or any(each["message"].startswith(STARTED) for each in found.logged())
                )
            )
            assert running.poll() is None, log.read_text()
            wait_until(lambda: not wait or httpx.get(f"{found.url}/readyz", verify=False).status_code == 200)
            yield found
        finally:
            running.kill()
