"""Servers that a user could pick instead: ``python -m bench.peers NAME ...`` makes their environments.

Each answers ``POST`` of a raw JPEG with pooled layers, with the seeded weights and the preprocessing of the plain loop.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOM = Path(__file__).parent
ENVIRONMENTS = ROOM / ".venvs"


@dataclass(frozen=True)
class Peer:
    """Where it answers and in what form; whether a request may name its layers, and packages of its own are needed."""

    path: str
    reply: str
    various: bool = False
    packages: bool = True


def module(name: str) -> str:
    """What ``python -m`` runs; it takes ``--port``, ``--model`` and ``--layers``."""
    return f"{__name__}.{name}"


def requirements(name: str) -> Path:
    """The pinned packages of a peer's environment."""
    return ROOM / "requirements" / f"{name}.txt"


def python(name: str, environments: Path = ENVIRONMENTS) -> Path:
    """The interpreter that runs a peer; it may be missing."""
    return environments / name / "bin" / "python" if PEERS[name].packages else Path(sys.executable)


def missing(name: str, environments: Path = ENVIRONMENTS) -> str:
    """What to do before a peer can run; empty where it can."""
    return "" if python(name, environments).exists() else f"{name} has no environment: python -m bench.peers {name}"


PEERS: dict[str, Peer] = {
    "naive": Peer("/extract", "json", various=True, packages=False),
    "litserve": Peer("/predict", "npy"),
}
