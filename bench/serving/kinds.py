"""What is measured, one function each: a round's figures of one load, by line of the table."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.machine import CpuMeter
from bench.serving.client import Answer, Ask, Connection, Figures, Sending, cpu_s, loaded, watched
from bench.serving.contenders import CLOSE, CONTENDERS, Vectors, deviation, extract, started
from bench.serving.loads import LAYER, Load
from bench.serving.repeat import repeat_disturbed
from bench.serving.server import READY_S, Server, serving
from bench.startup import LAYERTAP, LIMIT_S

Lines = dict[str, Figures]
WARM_S = 1.0


@dataclass(frozen=True)
class Bench:
    """What all measurements share; ``vectors`` are the first picture's, by model and layer."""

    folder: Path
    pictures: Sequence[Path]
    vectors: Mapping[str, Vectors]
    connections: Sequence[int]
    seconds: int


@dataclass(frozen=True)
class Kind:
    """A measurement, and the loads that it makes sense for.

    ``missing`` is what to do before it can be taken at all (empty: nothing), ``prepare`` is done before the rounds.
    """

    measure: Callable[[Bench, Load], Lines]
    suits: Callable[[Load], bool]
    missing: Callable[[], str] = str
    prepare: Callable[[Bench, Load], None] = lambda bench, load: None


def vectors(load: Load, picture: Path) -> Vectors:
    """A picture's vectors as a plain forward gives them."""
    found: Vectors = _alone("plain", load, [picture])[0]
    return found


def loop(name: str, bench: Bench, load: Load, options: Sequence[str] = ()) -> Lines:
    """The plain loop in a fresh process."""

    def run() -> Figures:
        figures, peak = _alone("loop", load, bench.pictures, bench.seconds, options=options)
        return {**figures, "peak_mib": peak}

    return {name: repeat_disturbed(run)}


def graph(bench: Bench, load: Load) -> Lines:
    """The plain loop over the graphs that ``warm`` has."""
    return loop("graph", bench, load, ["--graph", load.pool])


def compiled(bench: Bench, load: Load) -> None:
    """Have the graphs on disk; SystemExit where they give something else than the plain forward."""
    pictures = bench.pictures[:1]
    found, _ = _alone("plain", load, pictures, READY_S, options=["--graph", load.pool])
    for layer, vector in found.items():
        off = deviation(np.asarray(vector), np.asarray(bench.vectors[load.model][layer]))
        if not off <= CLOSE:
            raise SystemExit(f"the graph's vector is off by {off:.2g} of its greatest value")


def served(name: str, bench: Bench, load: Load) -> Lines:
    """One raw JPEG per request, at each number of connections, to a server that was started for it."""
    contender = CONTENDERS[name]
    found = {}
    with started(contender, load, bench.pictures[0], bench.vectors[load.model], bench.folder) as (server, start):
        for connections in bench.connections:
            sending = Sending(contender.paths(load), bench.pictures, connections, bench.seconds)
            run = partial(loaded, server, sending, start["idle_cores"], contender.read_batch_rows)
            found[f"{name} {connections}"] = repeat_disturbed(run) | start
    return found


def prepared(name: str, bench: Bench, load: Load) -> None:
    """Compile the warm plans of a server that has some."""
    if CONTENDERS[name].prepares:
        command = CONTENDERS[name].command(load, 0, bench.folder)
        subprocess.run([*LAYERTAP, "plan", *command[command.index("--config") :]], check=True)


def one(bench: Bench, load: Load) -> Lines:
    """One image at a time: in fresh processes, then over HTTP; ``ratio`` and ``beyond_ms`` are to the quicker process.

    With torch's defaults, threads spin while they wait, which is best on a quiet machine and dreadful on a busy one.
    """
    policies = {"bare": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}

    def run(policy: Mapping[str, str]) -> Figures:
        return _alone("bare", load, bench.pictures, bench.seconds, policy)[0]

    alone = {name: repeat_disturbed(partial(run, policy)) for name, policy in policies.items()}
    vector, _ = (np.asarray(figures.pop("vector")) for figures in alone.values())
    asks = [Ask(extract(load.model, (LAYER,), "flatten", "npy"), path.read_bytes()) for path in bench.pictures]
    with serving([load.model], bench.folder) as server:
        answers, shares = _asked(bench, server, asks)
    every = [answer for several in answers for answer in several]
    quicker = min(alone.values(), key=lambda figures: figures["p50_ms"])
    p50 = median(answer.wall_ms for answer in every)
    figures = {
        "p50_ms": p50,
        "forward_ms": median(answer.forward_ms for answer in every),
        "ratio": p50 / quicker["p50_ms"],
        "beyond_ms": p50 - quicker["p50_ms"],
        "images": len(every),
        "deviation": deviation(answers[0][0].array[0], vector),
        **shares,
    }
    return {**alone, "one": figures}


def early(bench: Bench, load: Load) -> Lines:
    """Layers at several depths in turn, one request at a time; ``ratio`` is measured share to the catalog's."""
    with serving([load.model], bench.folder) as server:
        with closing(Connection(server.port)) as line:
            catalog = {layer["name"]: layer for layer in line.get(f"/models/{load.model}/layers")["layers"]}
        names = [*EARLY[load.model], "."]
        shape = catalog["."]["inputs"][0]["shape"][1:]
        body = io.BytesIO()
        np.save(body, np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
        paths = [extract(load.model, (name,), "mean", "npy") for name in names]
        asks = [Ask(path, body.getvalue(), "application/x-npy") for path in paths]
        sequence, shares = _asked(bench, server, asks)
    *parts, whole = [_milliseconds(answers) | shares for answers in sequence]
    found = {}
    for name, part in zip(EARLY[load.model], parts, strict=True):
        share = catalog[name]["cost"]
        measured = {f"{key}_share": part[f"{key}_ms"] / whole[f"{key}_ms"] for key in ("forward", "wall")}
        ratios = {key.replace("share", "ratio"): value / share for key, value in measured.items()}
        found[f"early {name}"] = {**part, "catalog_share": share, **measured, **ratios}
    return {**found, "early .": whole}


def _alone(
    module: str,
    load: Load,
    pictures: Sequence[Path],
    seconds: float = 0,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> tuple[Figures, float]:
    """What a module of this package prints in a process of its own, and the most memory that it held."""
    command = [sys.executable, "-m", f"bench.serving.{module}", "--model", load.model, "--layers", *load.layers]
    command += ["--seconds", str(seconds), "--pictures", *map(str, pictures), *options]
    command += ["--cut"] if load.cut else []
    told, peak = watched(command, seconds + LIMIT_S, environment=environment)
    return json.loads(told), peak


def _asked(bench: Bench, server: Server, asks: Sequence[Ask]) -> tuple[list[list[Answer]], Figures]:
    """The answers to each of some requests, sent in turn over one connection, after a warm-up; who else used cores."""
    with closing(Connection(server.port)) as line:

        def run() -> Figures:
            meter = CpuMeter(lambda: cpu_s(server))
            answers = line.sequence(asks, bench.seconds)
            return {"answers": answers, **meter.get_shares()}

        line.sequence(asks, WARM_S)
        figures = repeat_disturbed(run)
    return figures.pop("answers"), figures


def _milliseconds(answers: Sequence[Answer]) -> dict[str, float]:
    return {
        "forward_ms": median(answer.forward_ms for answer in answers),
        "wall_ms": median(answer.wall_ms for answer in answers),
    }


def _unsent() -> str:
    return "" if shutil.which("wrk") else "wrk is missing, which makes the load: apt-get install wrk"


def _uncompiled() -> str:
    return "" if shutil.which(os.environ.get("CXX", "g++")) else "a C++ compiler is missing: apt-get install g++"


def _kind(name: str) -> Kind:
    contender = CONTENDERS[name]
    return Kind(
        partial(served, name), contender.suits, lambda: _unsent() or contender.missing(), partial(prepared, name)
    )


EARLY: dict[str, tuple[str, ...]] = {"resnet50": ("layer1", "layer2", "layer3", "layer4")}
KINDS: dict[str, Kind] = {
    "loop": Kind(partial(loop, "loop"), lambda load: True),
    "graph": Kind(graph, lambda load: len(load.sets) == 1, _uncompiled, compiled),
    **{name: _kind(name) for name in CONTENDERS},
    "one": Kind(one, lambda load: load.plain),
    "early": Kind(early, lambda load: load.plain and load.model in EARLY),
}
USUAL = ("loop", "graph", *CONTENDERS)
