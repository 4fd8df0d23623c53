"""A progress bar, by rich or tqdm where one of them is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Update = Callable[[int, int], None]  # told how many inputs are done, and how many of them have failed


@contextmanager
def show_progress(total: int | None, shown: bool | None) -> Iterator[Update]:
    """Show how far things are while the block runs; None shows it on terminals and in notebooks only."""
    wanted = (sys.stderr.isatty() or "ipykernel" in sys.modules) if shown is None else shown
    library = next((name for name in BARS if find_spec(name)), None) if wanted else None
    if library is None:
        yield lambda done, failed: None
        return
    with BARS[library](total) as update:
        yield update


@contextmanager
def _show_rich(total: int | None) -> Iterator[Update]:
    progress, console = import_module("rich.progress"), import_module("rich.console")
    columns = (
        progress.TextColumn("embedding"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[errors]}"),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, rate="", errors="")

        def update(done: int, failed: int) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.0f}/s" if speed else ""
            bar.update(task, completed=done, rate=rate, errors=f"{failed} failed" if failed else "")

        yield update


@contextmanager
def _show_tqdm(total: int | None) -> Iterator[Update]:
    with import_module("tqdm").tqdm(total=total, desc="embedding") as bar:

        def update(done: int, failed: int) -> None:
            bar.update(done - bar.n)
            if failed:
                bar.set_postfix(failed=failed)

        yield update


BARS: dict[str, Callable[[int | None], Any]] = {"rich": _show_rich, "tqdm": _show_tqdm}
