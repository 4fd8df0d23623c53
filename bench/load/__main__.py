"""The command line of the load tester."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from bench.load.options import Options
from bench.load.report import Report
from bench.load.runner import run
from bench.load.scenario import ScenarioError, read
from bench.load.show import console, notes, progress, tables
from bench.machine import described

PROG = "python -m bench.load"
SECONDS = 10.0
KNOWN_S = 10.0
EPILOG = """Exit status: 0; 1 where an answer was unexpected or missing; 2 where the command makes no sense or nobody
listens. In open loop latency counts from the moment a request was due, so a server that stalls can't hide it."""


def main(words: Sequence[str] | None = None) -> int:
    """Read, send, print, write; the exit status."""
    parser = _parser()
    words = sys.argv[1:] if words is None else list(words)
    chosen = parser.parse_args(words)
    try:
        scenarios, options = read(chosen.scenarios), _options(chosen)
    except (ScenarioError, ValueError) as error:
        parser.error(str(error))
    _listened(parser, options)
    machine = described()
    with progress(options) as watch:
        report = run(scenarios, options, watch)
    _print(report)
    if chosen.json:
        _write(chosen.json, words, machine, report)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Load for a layertap server.", epilog=EPILOG)
    add = parser.add_argument
    add("scenarios", type=Path, help="a YAML file, see bench/scenarios")
    add("--url", default="http://127.0.0.1:8000")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--connections", type=int, default=Options.connections, help="closed loop: each waits for its answer"
    )
    loop.add_argument("--rate", type=float, help="open loop: requests a second, whatever the server does")
    add("--arrivals", choices=("poisson", "uniform"), default="poisson", help="of an open loop")
    add("--most-in-flight", type=int, default=Options.most_in_flight, help="of an open loop; what exceeds is not sent")
    add("--requests", type=int, help="how many at most")
    add("--seconds", type=float, help=f"for how long at most; {SECONDS:g} where --requests is not given either")
    add("--warmup", type=int, default=0, metavar="REQUESTS", help="sent first and not counted")
    add("--seed", type=int, default=0, help="the same seed draws the same scenarios and moments")
    add("--timeout", type=float, default=Options.timeout, metavar="SECONDS", help="of connecting, sending, each read")
    add("--allow", type=int, action="append", default=[], metavar="STATUS", help="a status that is no fault: 429")
    add("--key-env", metavar="NAME", help="the environment variable that holds the API key")
    add("--json", type=Path, help="a file for the results")
    return parser


def _options(chosen: argparse.Namespace) -> Options:
    """ValueError where they make no sense."""
    unbounded = chosen.requests is None and chosen.seconds is None
    return Options(
        url=chosen.url,
        connections=chosen.connections,
        rate=chosen.rate,
        arrivals=chosen.arrivals,
        most_in_flight=chosen.most_in_flight,
        requests=chosen.requests,
        seconds=SECONDS if unbounded else chosen.seconds,
        warmup=chosen.warmup,
        seed=chosen.seed,
        timeout=chosen.timeout,
        allow=frozenset(chosen.allow),
        headers=_key(chosen.key_env),
    )


def _key(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ValueError(f"--key-env: the environment variable {variable} is not set")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _listened(parser: argparse.ArgumentParser, options: Options) -> None:
    """Any answer will do: better one clear message than thousands of failures."""
    try:
        httpx.get(f"{options.url.rstrip('/')}/livez", timeout=KNOWN_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        parser.error(f"no answer from {options.url}: {error}")


def _print(report: Report) -> None:
    out = console()
    for table in tables(report):
        out.print(table)
    for note in notes(report):
        out.print(note, highlight=False)


def _write(path: Path, words: Sequence[str], machine: dict[str, object], report: Report) -> None:
    command = shlex.join([*PROG.split(), *words])
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"command": command, "machine": machine, "results": asdict(report)}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
