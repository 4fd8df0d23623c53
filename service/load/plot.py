"""A run as a picture: good answers a second and latency over time, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path

from layertap.models.errors import LayertapError
from layertap.service.load.report import Report

MISSING = 'plots need matplotlib: pip install "layertap[bench]"'


def check_plot(path: Path) -> None:
    """LayertapError where matplotlib is missing, or the file's ending names no format that it writes."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise LayertapError(MISSING) from error
    formats = sorted(FigureCanvasBase.filetypes)
    if path.suffix[1:] not in formats:
        raise LayertapError(f"--plot can't write {path.suffix or 'a file without an ending'}", hint=", ".join(formats))


def write_plot(report: Report, title: str, path: Path) -> None:
    """Draw a run, in the format that the file's ending names."""
    from matplotlib.figure import Figure

    timeline = report.timeline
    figure = Figure(figsize=(8, 6), layout="constrained")
    rates, latencies = figure.subplots(2, 1, sharex=True)
    middles = [each.begin_s + each.seconds / 2 for each in timeline]
    for name in ("due", "good", "failed"):
        rates.plot(middles, [getattr(each, name) / each.seconds for each in timeline], label=name)
    answered = [(middle, each.latency_ms) for middle, each in zip(middles, timeline, strict=True) if each.latency_ms]
    for name in ("p50", "p90", "p99"):
        latencies.plot([at for at, _ in answered], [getattr(spread, name) for _, spread in answered], label=name)
    rates.set_ylabel("requests a second")
    latencies.set(xlabel="seconds since the start", ylabel="latency, ms")
    for axes in (rates, latencies):
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)
