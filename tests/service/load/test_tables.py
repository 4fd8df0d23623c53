"""A report as tables for a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from layertap.service.load.options import Options
from layertap.service.load.run import run
from layertap.service.load.tables import make_tables
from tests.server import Live
from tests.service.load.entries import VECTOR, of

ESCAPE = "\x1b"
HOSTILE = f"a{ESCAPE}]0;title\a[bold]b"


def test_hostile_names(live: Live) -> None:
    """A name reaches no terminal as what moves its cursor, and is no markup."""
    report = run(of({**VECTOR, "name": HOSTILE}), Options(live.url, requests=4))
    shown = StringIO()
    Console(file=shown, width=300).print(*make_tables(report))
    assert "[bold]b" in shown.getvalue()
    assert not {ESCAPE, "\a"} & set(shown.getvalue())
