"""What a server's threads have used, and what it says of its requests itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.machine import TICK_S
from bench.serving.metrics import scrape
from bench.serving.server import Server

LOOP, OTHERS = "event loop", "others"
THREADS = "LAYERTAP_WORKERS=0"  # threads of one process are told apart
ROLES = {"decode": "decoding", "model-": "forwards", "side": "side pool"}  # by how a thread's name begins
TIMES = slice(11, 13)  # user and system; what follows in a thread's stat is of the whole process's children
Samples = dict[tuple[str, str], float]  # by name and the label that tells series apart


def used(server: Server) -> Counter[str]:
    """CPU seconds so far, by what threads are for."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        name, stat = _named(task)
        found[_role(task, server, name)] += sum(map(int, stat[TIMES])) * TICK_S
    return found


def samples(server: Server) -> Samples:
    """Sums and counts of ``GET /metrics``."""
    return {
        (sample.name, sample.labels.get("step", "")): sample.value
        for sample in scrape(server.port)
        if sample.name.endswith(("_sum", "_count"))
    }


def _named(task: Path) -> tuple[str, list[str]]:
    name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    return name, rest.split()


def _role(task: Path, server: Server, name: str) -> str:
    if task.name == str(server.process.pid):
        return LOOP
    return next((role for start, role in ROLES.items() if name.startswith(start)), OTHERS)
