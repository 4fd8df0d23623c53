"""Runs a checkout's servers, sends all requests one after another, and writes down what comes back."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.recorded.client import exchange
from tests.recorded.masks import canonical, describe, mask_tree
from tests.recorded.request import Request
from tests.recorded.server import Checkout, run, serve
from tests.recorded.setups import COMMANDS, SETUPS, Setup

METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
Recording = dict[str, Any]


def record(
    checkout: Checkout, setups: Iterable[Setup] = SETUPS, commands: Iterable[tuple[str, ...]] = COMMANDS
) -> Recording:
    """All answers of a checkout by the name of the request, and documents by theirs."""
    recording: Recording = {"answers": {}, "documents": {}}
    for setup in setups:
        _record_setup(checkout, setup, recording)
    for words in commands:
        status, text = run(checkout, *words)
        recording["documents"][f"layertap {' '.join(words)}"] = f"status {status}\n{mask_tree(text)}"
    return recording


def count_kinds(recording: Recording) -> dict[str, Counter[int]]:
    """How many answers there are of each kind, by status."""
    kinds: dict[str, Counter[int]] = {}
    for name, answer in recording["answers"].items():
        kinds.setdefault(name.split("/", 1)[0], Counter())[answer["status"]] += 1
    return kinds


def _record_setup(checkout: Checkout, setup: Setup, recording: Recording) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = setup.write(Path(folder)) if setup.write else None
        with serve(checkout, config, setup.settings) as port:
            for request in setup.requests():
                if request.name in recording["answers"]:
                    raise ValueError(f"two requests are called {request.name}")
                recording["answers"][request.name] = describe(exchange(port, request))
            for name, text in _documents(port, setup):
                recording["documents"][f"{setup.name} {name}"] = text


def _documents(port: int, setup: Setup) -> Iterator[tuple[str, str]]:
    openapi = exchange(port, Request("", "GET", "/openapi.json", setup.headers))
    yield "openapi", canonical(json.loads(openapi.body))
    series, helps = _metrics(exchange(port, Request("", "GET", "/metrics", setup.headers)).body.decode())
    yield "metrics", series
    yield "metrics help", helps


def _metrics(text: str) -> tuple[str, str]:
    """Types and series with their labels, without values and bounds of bins; and the help texts, apart."""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    series = {_series(match) for match in map(METRIC.fullmatch, text.splitlines()) if match}
    types = [line for line in comments if line.startswith("# TYPE")]
    return "\n".join([*types, *sorted(series)]), "\n".join(line for line in comments if line.startswith("# HELP"))


def _series(match: re.Match[str]) -> str:
    labels = [f'{name}="{value if name != "le" else "…"}"' for name, value in LABEL.findall(match[2] or "")]
    return f"{match[1]}{{{','.join(labels)}}}"
