"""What is told while a run goes on: a line that moves on a terminal, a line every so often elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from layertap.service.load.options import MAX_REQUESTS, Options
from layertap.service.load.run import Now, Watch

COLUMNS = "{task.completed:.0f}{task.fields[unit]}  {task.fields[text]}"
LINE_S = 5.0  # between lines where there is no terminal; the first one comes with the first look


@contextmanager
def show_progress(options: Options, console: Console) -> Iterator[Watch]:
    """Tell how a run goes on while the block runs."""
    if console.is_terminal:
        with _show_bar(options, console) as watch:
            yield watch
    else:
        yield _make_line_watch(console)


def format_line(now: Now) -> str:
    """The figures of now."""
    latency = f"p50 {now.latency_ms.p50:.1f} ms, p99 {now.latency_ms.p99:.1f} ms" if now.latency_ms else "no answer"
    missed = f", {now.not_sent} not sent" if now.not_sent else ""
    return f"{now.done} done, {now.per_second:.1f}/s, {latency}, {now.failed} failed{missed}"


@contextmanager
def _show_bar(options: Options, console: Console) -> Iterator[Watch]:
    columns = (SpinnerColumn(), BarColumn(), TextColumn(COLUMNS), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        by_requests = options.requests < MAX_REQUESTS
        total = options.requests if by_requests else options.duration
        task = shown.add_task("", total=total, unit=" requests" if by_requests else " s", text="warming up")

        def watch(now: Now) -> None:
            done = now.done + now.not_sent if by_requests else now.elapsed_s
            shown.update(task, completed=done, text=format_line(now), refresh=True)

        shown.refresh()
        yield watch


def _make_line_watch(console: Console) -> Watch:
    due = 0.0

    def watch(now: Now) -> None:
        nonlocal due
        if now.elapsed_s >= due:
            due = now.elapsed_s + LINE_S
            console.print(f"{now.elapsed_s:.0f} s: {format_line(now)}", markup=False, highlight=False, soft_wrap=True)

    return watch
