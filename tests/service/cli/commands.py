"""What a command leaves behind, and a configuration for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from layertap.service.cli import console
from layertap.service.cli.main import main

ROOT = Path(__file__).parents[3]

CONFIG = """
models:
  - name: touchy
    source: python:tests.service.nets_http:Touchy
    weights: random:0
    device: cpu
    inputs: [{name: x, shape: [4]}]
"""


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status, stdout and stderr."""

    status: int
    out: str
    notes: str


Command = Callable[..., Done]


def run_here(*words: str | Path) -> Done:
    """``layertap`` in this process, where no fixture's ``command`` is; without workers, which take seconds to start."""
    out, notes = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(notes):
        for printer in (console.stdout, console.stderr):
            patch.setattr(printer, "width", 200)
        patch.setenv("LAYERTAP_WORKERS", "0")
        patch.setattr(sys, "argv", ["layertap", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return Done(int(ended.value.code or 0), out.getvalue(), notes.getvalue())
