"""What people see: the progress while a run goes on, tables at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load.options import Options
from bench.load.report import Figures, Report, Spread
from bench.load.runner import Now, Watch

WIDTH = 120  # where the output is no terminal
BUSY = 0.8  # CPU-seconds a second from which the client may be what limits
COLUMNS = "{task.completed:.0f}{task.fields[unit]}  {task.fields[text]}"


@contextmanager
def progress(options: Options) -> Iterator[Watch | None]:
    """A line that is brought up to date while the block runs; None, and no line, where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), BarColumn(), TextColumn(COLUMNS), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        by_requests = options.requests is not None
        total = options.requests if by_requests else options.seconds
        task = shown.add_task("", total=total, unit=" requests" if by_requests else " s", text="warming up")

        def watch(now: Now) -> None:
            done = now.done + now.not_sent if by_requests else now.elapsed_s
            shown.update(task, completed=done, text=line(now), refresh=True)

        shown.refresh()
        yield watch


def line(now: Now) -> str:
    """The figures of now."""
    latency = f"p50 {now.latency_ms.p50:.1f} ms, p99 {now.latency_ms.p99:.1f} ms" if now.latency_ms else "no answer"
    missed = f", {now.not_sent} not sent" if now.not_sent else ""
    return f"{now.done} done, {now.per_second:.1f}/s, {latency}, {now.bad} bad{missed}"


def console() -> Console:
    """Where the tables go."""
    wide = Console()
    return wide if wide.is_terminal else Console(width=WIDTH)


def tables(report: Report) -> Iterator[Table]:
    """The tables that have something to tell."""
    rows = {**report.scenarios, "total": report.total}
    yield _load(rows, report)
    yield _outcomes(rows)
    if report.total.refused:
        yield _refusals(rows)
    if report.total.steps:
        yield _steps(report.total)


def notes(report: Report) -> Iterator[str]:
    """What should be known when the tables are read."""
    if report.interrupted:
        yield "interrupted: these are the figures of what was done"
    if report.late_ms is not None:
        yield f"sent after their moments by p50 {report.late_ms.p50:.1f} ms, p99 {report.late_ms.p99:.1f} ms"
    busy = ": the client may be what limits" if report.client_cpu >= BUSY else ""
    yield f"client: {report.client_cpu:.2f} CPU-seconds a second{busy}"


def _load(rows: Mapping[str, Figures], report: Report) -> Table:
    numbers = ("requests", "per s", "good per s", "rows per s", "MB per s", *LATENCIES)
    shown = _table(f"Load: {report.elapsed_s:.1f} s", "scenario", *numbers)
    for name, each in rows.items():
        rates = (each.per_second, each.goodput, each.rows_per_second, each.bytes_per_second / 1e6)
        _add(shown, rows, name, str(each.requests), *(f"{rate:.1f}" for rate in rates), *_spread(each.latency_ms))
    return shown


def _outcomes(rows: Mapping[str, Figures]) -> Table:
    shown = _table("Outcomes", "scenario", "status × answers", "unexpected", "no answer", "client left", "not sent")
    for name, each in rows.items():
        numbers = (each.unexpected, each.left, each.not_sent)
        unexpected, left, not_sent = (str(number or "") for number in numbers)
        _add(shown, rows, name, _counts(each.statuses), unexpected, _counts(each.errors), left, not_sent)
    return shown


def _refusals(rows: Mapping[str, Figures]) -> Table:
    shown = _table("Refusals (429, 503)", "scenario", "refused", "with Retry-After", *LATENCIES)
    for name, each in rows.items():
        if each.refused:
            retry_after = str(each.refused_with_retry_after)
            _add(shown, rows, name, str(each.refused), retry_after, *_spread(each.refusal_ms))
    return shown


def _steps(total: Figures) -> Table:
    shown = _table("Server-Timing, without refusals", "step", "answers", "median ms", "p99 ms")
    for name, step in total.steps.items():
        shown.add_row(name, str(step.answers), _milliseconds(step.median), _milliseconds(step.p99))
    return shown


def _table(title: str, first: str, *others: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column(first)
    for name in others:
        shown.add_column(name, justify="right")
    return shown


def _add(shown: Table, rows: Mapping[str, Figures], name: str, *cells: str) -> None:
    """A row; a line above the last one, the total."""
    if name == list(rows)[-1]:
        shown.add_section()
    shown.add_row(name, *cells)


def _counts(counted: Mapping[int, int] | Mapping[str, int]) -> str:
    return ", ".join(f"{each} × {number}" for each, number in counted.items())


def _spread(spread: Spread | None) -> tuple[str, ...]:
    values = (None,) * 4 if spread is None else (spread.p50, spread.p90, spread.p99, spread.max)
    return tuple(map(_milliseconds, values))


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


LATENCIES = ("p50 ms", "p90 ms", "p99 ms", "max ms")
