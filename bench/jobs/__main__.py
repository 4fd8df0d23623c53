"""Thirty jobs of people who look inside models, each by request and by their own library's script.

``python -m bench.jobs [--only NAME ...] [--rounds 3] [--json FILE]``: for each job the lines of both, seconds of both
(the median of rounds, in turn), and the largest difference of their results, by the largest value. Models are small and
have seeded weights; a server of this machine has them too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.jobs.lab import Lab, compute_difference, open_lab
from bench.jobs.table import JOBS, Job, count_lines
from bench.machine import described

PEERS = Path(__file__).parents[2] / ".venvs" / "peers"
INSTALL = "install its peer, {peer}, by `make peers`"
WARM_UPS, WARM_UP_S = 6, 15.0
COLUMNS = ("job", "peer", "lines", "peer's", "seconds", "peer's", "difference")


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[job.name for job in JOBS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    sys.path.append(str(PEERS))
    chosen = [job for job in JOBS if not options.only or job.name in options.only]
    with open_lab() as lab:
        measured = dict(measure(lab, chosen, options.rounds))
    Console(width=140).print(tabulate(measured))
    for job in chosen:
        if job.is_missing:
            print(f"skipped {job.name}: {INSTALL.format(peer=job.peer)}")
    if options.json:
        options.json.write_text(json.dumps({"machine": described(), "jobs": measured}, indent=1))


def measure(lab: Lab, jobs: Sequence[Job], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines, seconds and differences of each job whose peer is installed."""
    for job in track([job for job in jobs if not job.is_missing], console=Console(stderr=True)):
        row = {"title": job.title, "peer": job.peer}
        row |= {"lines": count_lines(job.request), "peer_lines": count_lines(job.script)}
        row["difference"] = compute_difference(job.request(lab), job.script(lab))
        for run in (job.request, job.script):
            warm_up(run, lab)
        taken = [(time_run(job.request, lab), time_run(job.script, lab)) for _ in range(rounds)]
        row["seconds"], row["peer_seconds"] = map(list, zip(*taken, strict=True))
        sys.stderr.write(f"{job.name}: {row}\n")
        yield job.name, row


def warm_up(run: Any, lab: Lab) -> None:
    """Run it again for a few seconds: each worker compares its first three shared forwards with rows that run alone."""
    begun = time.perf_counter()
    for _ in range(WARM_UPS):
        if time.perf_counter() - begun < WARM_UP_S:
            run(lab)


def time_run(run: Any, lab: Lab) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    run(lab)
    return time.perf_counter() - begun


def tabulate(measured: dict[str, dict[str, Any]]) -> Table:
    """A row for each job."""
    table = Table(*COLUMNS, box=MARKDOWN, title=f"{os.cpu_count()} cores")
    for row in measured.values():
        seconds = [f"{median(row[key]):.2f}" for key in ("seconds", "peer_seconds")]
        lines = [str(row[key]) for key in ("lines", "peer_lines")]
        table.add_row(row["title"], row["peer"], *lines, *seconds, f"{row['difference']:.0e}")
    return table


if __name__ == "__main__":
    main()
