"""What is measured, one function each: a round's figures of one model, by line of the table."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.serving.client import Answer, Ask, Figures, Line, loaded
from bench.serving.plain import LAYER
from bench.serving.server import WARM, Server
from bench.startup import LIMIT_S

Lines = dict[str, Figures]
WARM_S = 1.0


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    server: Server
    pictures: Sequence[Path]
    connections: Sequence[int]
    seconds: int


def loop(bench: Bench, model: str, lines: Lines) -> Lines:
    """The plain threaded loop in a fresh process."""
    return {"loop": _alone("loop", bench, model)}


def server(bench: Bench, model: str, lines: Lines) -> Lines:
    """One raw JPEG per request, at each number of connections; ``ratio`` is to the loop of the same round."""
    return _served("server", bench, model, lines)


def warm(bench: Bench, model: str, lines: Lines) -> Lines:
    """The same, answered by a compiled graph."""
    return _served("warm", bench, model + WARM, lines)


def _served(name: str, bench: Bench, model: str, lines: Lines) -> Lines:
    found = {}
    for connections in bench.connections:
        path = _path(model, (LAYER,), "flatten", "npy")
        figures = loaded(bench.server, [path], bench.pictures, connections, bench.seconds)
        found[f"{name} {connections}"] = figures | _ratio(figures, lines.get("loop"))
    return found


def mixed(bench: Bench, model: str, lines: Lines) -> Lines:
    """One set of layers in all requests, then eight different ones in turn, at the first number of connections."""
    connections = bench.connections[0]
    sets = {"uniform": ((),), "mixed": MIXED[model]}
    found = {}
    for name, wanted in sets.items():
        paths = [_path(model, (*layers, LAYER), "mean", "npz") for layers in wanted]
        found[f"{name} {connections}"] = loaded(bench.server, paths, bench.pictures, connections, bench.seconds)
    uniform, various = found.values()
    various.update(_ratio(various, uniform))
    return found


def one(bench: Bench, model: str, lines: Lines) -> Lines:
    """One image at a time: in fresh processes, then over HTTP; ``ratio`` and ``beyond_ms`` are to the quicker process.

    With torch's defaults, threads spin while they wait, which is best on a quiet machine and dreadful on a busy one.
    """
    alone = {"bare": _alone("bare", bench, model), "passive": _alone("bare", bench, model, OMP_WAIT_POLICY="PASSIVE")}
    vector, _ = (np.asarray(figures.pop("vector")) for figures in alone.values())
    asks = [Ask(_path(model, (LAYER,), "flatten", "npy"), path.read_bytes()) for path in bench.pictures]
    answers = _asked(bench, asks)
    every = [answer for several in answers for answer in several]
    quicker = min(alone.values(), key=lambda figures: figures["p50_ms"])
    p50 = median(answer.wall_ms for answer in every)
    figures = {
        "p50_ms": p50,
        "forward_ms": median(answer.forward_ms for answer in every),
        "ratio": p50 / quicker["p50_ms"],
        "beyond_ms": p50 - quicker["p50_ms"],
        "images": len(every),
        # That both compute the same: the greatest difference relative to the greatest value.
        "deviation": float(np.abs(answers[0][0].array[0] - vector).max() / np.abs(vector).max()),
    }
    return {**alone, "one": figures}


def early(bench: Bench, model: str, lines: Lines) -> Lines:
    """Layers at several depths in turn, one request at a time; ``ratio`` is measured share to the catalogue's."""
    if model not in EARLY:
        return {}
    with closing(Line(bench.server.port)) as line:
        catalogue = {layer["name"]: layer for layer in line.get(f"/models/{model}/layers")["layers"]}
    names = [*EARLY[model], "."]
    shape = catalogue["."]["inputs"][0]["shape"][1:]
    body = io.BytesIO()
    np.save(body, np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    asks = [Ask(_path(model, (name,), "mean", "npy"), body.getvalue(), "application/x-npy") for name in names]
    *parts, whole = [_milliseconds(answers) for answers in _asked(bench, asks)]
    found = {}
    for name, part in zip(EARLY[model], parts, strict=True):
        share = catalogue[name]["cost"]
        measured = {f"{key}_share": part[f"{key}_ms"] / whole[f"{key}_ms"] for key in ("forward", "wall")}
        ratios = {key.replace("share", "ratio"): value / share for key, value in measured.items()}
        found[f"early {name}"] = part | {"catalogue_share": share} | measured | ratios
    return found | {"early .": whole}


def _alone(module: str, bench: Bench, model: str, **environment: str) -> Figures:
    """What a module of this package prints in a process of its own."""
    command = [sys.executable, "-m", f"bench.serving.{module}", "--model", model, "--seconds", str(bench.seconds)]
    command += ["--pictures", *map(str, bench.pictures)]
    told = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
        timeout=bench.seconds + LIMIT_S,
        check=True,
    )
    figures: Figures = json.loads(told.stdout)
    return figures


def _asked(bench: Bench, asks: Sequence[Ask]) -> list[list[Answer]]:
    """The answers to each of some requests, sent in turn over one connection, after a warm-up."""
    with closing(Line(bench.server.port)) as line:
        line.sequence(asks, WARM_S)
        return line.sequence(asks, bench.seconds)


def _milliseconds(answers: Sequence[Answer]) -> dict[str, float]:
    return {
        "forward_ms": median(answer.forward_ms for answer in answers),
        "wall_ms": median(answer.wall_ms for answer in answers),
    }


def _path(model: str, layers: Sequence[str], pool: str, form: str) -> str:
    return f"/extract?model={model}&layers={','.join(layers)}&pool={pool}&format={form}"


def _ratio(figures: Figures, other: Figures | None) -> Figures:
    return {"ratio": figures["per_s"] / other["per_s"]} if other else {}


# Beside the last layer, so that every forward is equally deep.
MIXED: dict[str, tuple[tuple[str, ...], ...]] = {
    "resnet50": (
        (),
        ("layer1",),
        ("layer2",),
        ("layer3",),
        ("layer4",),
        ("layer2.0.bn1",),
        ("layer3", "layer4"),
        ("layer1", "layer3"),
    ),
    "mobilenet_v3_small": (
        (),
        ("features.1",),
        ("features.4",),
        ("features.8",),
        ("features.12",),
        ("features.4.block.0.1",),
        ("features.8", "features.12"),
        ("features.1", "features.8"),
    ),
}
EARLY: dict[str, tuple[str, ...]] = {"resnet50": ("layer1", "layer2", "layer3", "layer4")}
KINDS: dict[str, Callable[[Bench, str, Lines], Lines]] = {
    "loop": loop,
    "server": server,
    "warm": warm,
    "mixed": mixed,
    "one": one,
    "early": early,
}
