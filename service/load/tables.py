"""What a run tells: its progress, and its report as tables and notes for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layertap.service.load.figures import Figures, Spread
from layertap.service.load.report import Report
from layertap.service.load.run import Now, Watch
from layertap.service.logs import escape_unprintable

BUSY = 0.8  # CPU-seconds a second from which the client may be what limits
LATENCIES = ("p50 ms", "p90 ms", "p99 ms", "max ms")


def make_tables(report: Report) -> Iterator[Table]:
    """The tables that have something to tell."""
    rows = {**report.kinds, "total": report.total}
    yield _make_load(rows, report)
    yield _make_outcomes(rows)
    if report.total.refused:
        yield _make_refusals(rows)
    if report.total.steps:
        yield _make_steps(report.total)


def make_notes(report: Report) -> Iterator[str]:
    """What should be known when the figures are read."""
    if report.interrupted:
        yield "interrupted: these are the figures of what was done"
    if report.late_ms is not None:
        yield f"sent after their moments by p50 {report.late_ms.p50:.1f} ms, p99 {report.late_ms.p99:.1f} ms"
    busy = ": the client may be what limits" if report.client_cpu >= BUSY else ""
    yield f"client: {report.client_cpu:.2f} CPU-seconds a second{busy}"


def format_counts(counted: Mapping[int, int] | Mapping[str, int]) -> str:
    """Such as ``200 × 12, 429 × 3``."""
    return ", ".join(f"{each} × {number}" for each, number in counted.items())


def _make_load(rows: Mapping[str, Figures], report: Report) -> Table:
    numbers = ("requests", "per s", "good per s", "rows per s", "MB per s", *LATENCIES)
    shown = _make_table(f"Load: {report.elapsed_s:.1f} s", "request", *numbers)
    for name, each in rows.items():
        rates = (each.per_second, each.goodput, each.rows_per_second, each.bytes_per_second / 1e6)
        _add(shown, rows, name, str(each.requests), *(f"{rate:.1f}" for rate in rates), *_format(each.latency_ms))
    return shown


def _make_outcomes(rows: Mapping[str, Figures]) -> Table:
    shown = _make_table("Outcomes", "request", "status × answers", "unexpected", "no answer", "client left", "not sent")
    for name, each in rows.items():
        unexpected, left, not_sent = (str(number or "") for number in (each.unexpected, each.left, each.not_sent))
        counts = (format_counts(each.statuses), unexpected, format_counts(each.errors))
        _add(shown, rows, name, *counts, left, not_sent)
    return shown


def _make_refusals(rows: Mapping[str, Figures]) -> Table:
    shown = _make_table("Refusals (429, 503)", "request", "refused", "with Retry-After", *LATENCIES)
    for name, each in rows.items():
        if each.refused:
            retry_after = str(each.refused_with_retry_after)
            _add(shown, rows, name, str(each.refused), retry_after, *_format(each.refusal_ms))
    return shown


def _make_steps(total: Figures) -> Table:
    shown = _make_table("Server-Timing, without refusals", "step", "answers", "mean ms", "median ms", "p99 ms")
    for name, step in total.steps.items():
        times = map(_format_milliseconds, (step.mean, step.median, step.p99))
        shown.add_row(_escape(name), str(step.answers), *times)
    return shown


def _make_table(title: str, first: str, *others: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column(first)
    for name in others:
        shown.add_column(name, justify="right")
    return shown


def _add(shown: Table, rows: Mapping[str, Figures], name: str, *cells: str) -> None:
    """A row; a line above the last one, the total."""
    if name == list(rows)[-1]:
        shown.add_section()
    shown.add_row(_escape(name), *cells)


def _escape(text: str) -> str:
    """A name, which a server may have given, that neither rich nor a terminal takes for more than that."""
    return escape(escape_unprintable(text))


def _format(spread: Spread | None) -> tuple[str, ...]:
    values = (None,) * 4 if spread is None else (spread.p50, spread.p90, spread.p99, spread.max)
    return tuple(map(_format_milliseconds, values))


def _format_milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


LINE_S = 5.0  # between lines where there is no terminal; the first one comes with the first look


@contextmanager
def show_progress(console: Console) -> Iterator[Watch]:
    """Tell how a run goes on while the block runs."""
    if console.is_terminal:
        with console.status("warming up") as status:
            yield lambda now: status.update(_format_line(now))
        return
    due = 0.0

    def watch(now: Now) -> None:
        nonlocal due
        if now.elapsed_s >= due:
            due = now.elapsed_s + LINE_S
            console.print(_format_line(now), markup=False, highlight=False, soft_wrap=True)

    yield watch


def _format_line(now: Now) -> str:
    """The figures of now."""
    latency = f"p50 {now.latency_ms.p50:.1f} ms, p99 {now.latency_ms.p99:.1f} ms" if now.latency_ms else "no answer"
    missed = f", {now.not_sent} not sent" if now.not_sent else ""
    return f"{now.elapsed_s:.0f} s: {now.done} done, {now.per_second:.1f}/s, {latency}, {now.failed} failed{missed}"
