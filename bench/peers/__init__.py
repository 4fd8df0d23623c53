"""Servers that a user could pick instead: ``python -m bench.peers NAME ...`` makes their environments.

Each answers ``POST`` of a raw JPEG with pooled layers, with the seeded weights and the preprocessing of the plain loop.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOM = Path(__file__).parent
ENVIRONMENTS = ROOM / ".venvs"


@dataclass(frozen=True)
class Peer:
    """Where it answers and in what form; whether a request may name its layers, and packages of its own are needed.

    ``programs`` it needs besides, each with what installs it.
    """

    path: str
    reply: str
    various: bool = False
    packages: bool = True
    programs: Mapping[str, str] = field(default_factory=dict)


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
    lacks = [
        f"{name} needs {program}: {install}"
        for program, install in PEERS[name].programs.items()
        if not shutil.which(program)
    ]
    if not python(name, environments).exists():
        lacks.append(f"{name} has no environment: python -m bench.peers {name}")
    return "; ".join(lacks)


PEERS: dict[str, Peer] = {
    "naive": Peer("/extract", "json", various=True, packages=False),
    "litserve": Peer("/predict", "npy"),
    "torchserve": Peer("/predictions/model", "npy", programs={"java": "apt-get install default-jre-headless"}),
}
