"""What a run shows: lines while it goes on, a table, JSON, a plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layertap.models.errors import LayertapError
from layertap.service.load.figures import REFUSALS, Figures, Spread, make_spread
from layertap.service.load.run import LoadRun
from layertap.service.logs import escape_unprintable
from layertap.service.version import get_version

BUSY = 0.8  # CPU-seconds a second from which the client may be what limits
INTERVALS = 60  # of a plot
COLUMNS = ("requests", "failed", "good/s", "rows/s", "p50 ms", "p90 ms", "p99 ms", "max ms", "outcomes")


def make_watch(console: Console) -> Callable[[LoadRun], None]:
    """Print, at each look, a line about what came since the last one; ``failed`` is of all the run."""
    seen, failed, last = 0, 0, 0.0

    def watch(run: LoadRun) -> None:
        nonlocal seen, failed, last
        new = run.samples[seen:]
        seen, failed = seen + len(new), failed + sum(each.failed for each in new)
        rate, last = len(new) / max(run.elapsed_s - last, 1e-9), run.elapsed_s
        latency = make_spread(each.seconds for each in new if each.status is not None) or "no answer"
        line = f"{run.elapsed_s:.0f} s: {seen} done, {rate:.1f}/s, {latency}, {failed} failed"
        console.print(line, highlight=False, soft_wrap=True)

    return watch


def print_report(run: LoadRun, console: Console) -> None:
    """Print a table with a row for each kind of request, and what should be known when it is read."""
    table = Table("request", title=f"Load: {run.elapsed_s:.1f} s", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, figures in run.by_kind.items():
        table.add_row(escape(escape_unprintable(name)), *_format_cells(figures))
    table.add_section()
    total = run.total
    table.add_row("total", *_format_cells(total))
    console.print(table)
    if run.interrupted:
        console.print("interrupted: these are the figures of what was done")
    if total.refusal_ms is not None:
        console.print(f"refusals (429, 503), in no percentile above: {total.refusal_ms}", highlight=False)
    if run.options.rate is not None:
        console.print(f"sent after their moments by {find_lateness(run)}", highlight=False)
    busy = ": the client may be what limits" if run.client_cpu >= BUSY else ""
    console.print(f"client: {run.client_cpu:.2f} CPU-seconds a second{busy}", highlight=False)


def _format_cells(figures: Figures) -> list[str]:
    latency = ("",) * 4 if figures.latency_ms is None else (f"{each:.1f}" for each in astuple(figures.latency_ms))
    outcomes = ", ".join(f"{name} × {count}" for name, count in (figures.statuses | figures.errors).items())
    rates = f"{figures.goodput:.1f}", f"{figures.rows_per_second:.1f}"
    return [str(figures.requests), str(figures.failed or ""), *rates, *latency, outcomes]


def find_lateness(run: LoadRun) -> Spread | None:
    """How long after their moments requests were sent, where any was."""
    return make_spread(each.late for each in run.samples if each.late is not None)


def make_document(run: LoadRun, scenario: str, breaches: list[str]) -> dict[str, object]:
    """A run that has just ended as plain data for JSON: what was asked, when, what came of it; no key."""
    options = {name: value for name, value in vars(run.options).items() if name != "headers"}  # these have the key
    return {
        "scenario": scenario,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": get_version(),
        "options": options | {"allow": sorted(run.options.allow)},
        "breaches": breaches,
        "results": {
            "total": asdict(run.total),
            "kinds": {name: asdict(figures) for name, figures in run.by_kind.items()},
            "elapsed_s": round(run.elapsed_s, 3),
            "client_cpu": round(run.client_cpu, 3),
            "late_ms": asdict(late) if run.options.rate is not None and (late := find_lateness(run)) else None,
            "interrupted": run.interrupted,
        },
    }


def check_plot(path: Path) -> None:
    """LayertapError where matplotlib is missing, or the file's ending names no format that it writes."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise LayertapError("plots need matplotlib", hint='pip install "layertap[charts]"') from error
    if path.suffix[1:] not in (formats := sorted(FigureCanvasBase.filetypes)):
        raise LayertapError(f"--plot can't write {path.suffix or 'a file without an ending'}", hint=", ".join(formats))


def write_plot(run: LoadRun, title: str, path: Path) -> None:
    """Draw rates and latency over time, in the format that the file's ending names."""
    from matplotlib.figure import Figure

    answers = [each for each in run.samples if each.status is not None and each.status not in REFUSALS]
    moments = {
        "due": [each.at for each in run.samples],
        "good": [each.at + each.seconds for each in run.samples if each.status == each.kind.expect],
        "failed": [each.at + each.seconds for each in run.samples if each.failed],
    }
    figure = Figure(figsize=(8, 6), layout="constrained")
    rates, latencies = figure.subplots(2, 1, sharex=True)
    edges = np.linspace(0, run.elapsed_s, INTERVALS + 1)
    for name, values in moments.items():
        rates.stairs(np.histogram(values, edges)[0] / edges[1], edges, label=name)
    due_s, latency_ms = [each.at for each in answers], [1000 * each.seconds for each in answers]
    latencies.plot(due_s, latency_ms, ".", markersize=2, rasterized=True, label="an answer, by when it was due")
    if spread := run.total.latency_ms:
        latencies.axhline(spread.p50, color="C1", label="p50")
        latencies.axhline(spread.p99, color="C3", label="p99")
    rates.set_ylabel("requests a second")
    latencies.set(xlabel="seconds since the start", ylabel="latency, ms")
    for axes in (rates, latencies):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")  # the best place takes long to find among many points
    figure.suptitle(title)
    figure.savefig(path)
