"""What is told while a run goes on."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from layertap.service.load.figures import Spread
from layertap.service.load.run import Now
from layertap.service.load.tables import show_progress

LATENCY = Spread(10.0, 20.0, 30.0, 40.0)


def make_now(elapsed_s: float) -> Now:
    """A hundred requests a second, of which one each second failed."""
    return Now(elapsed_s, int(100 * elapsed_s), 0, int(elapsed_s), 100.0, LATENCY)


def test_lines() -> None:
    """Without a terminal there is a line at the first look, and then one every five seconds."""
    out = StringIO()
    with show_progress(Console(file=out, width=40)) as watch:
        for second in range(1, 13):
            watch(make_now(second))
    assert out.getvalue().splitlines() == [
        f"{second} s: {100 * second} done, 100.0/s, p50 10.0 ms, p99 30.0 ms, {second} failed" for second in (1, 6, 11)
    ]


def test_nothing_yet() -> None:
    """Neither answers nor requests that were not sent are passed over."""
    out = StringIO()
    with show_progress(Console(file=out)) as watch:
        watch(Now(1.0, 0, 7, 0, 0.0, None))
    assert out.getvalue() == "1 s: 0 done, 0.0/s, no answer, 0 failed, 7 not sent\n"


def test_terminal() -> None:
    """On a terminal one line changes, and is gone in the end."""
    out = StringIO()
    with show_progress(Console(file=out, force_terminal=True, width=120, color_system=None)) as watch:
        watch(make_now(3))
    assert "3 s: 300 done, 100.0/s, p50 10.0 ms, p99 30.0 ms, 3 failed" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K")
