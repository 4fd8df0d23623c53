"""What a command leaves behind, and a configuration for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
