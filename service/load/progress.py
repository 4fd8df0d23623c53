"""What is told while a run goes on: a line that changes on a terminal, a line every so often elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from layertap.service.load.run import Now, Watch

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
