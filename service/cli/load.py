"""``layertap load``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.models.errors import LayertapError
from layertap.service.cli.console import stderr, stdout
from layertap.service.cli.setup import KEY_VARIABLE
from layertap.service.load.options import MAX_REQUESTS, Arrivals, Options
from layertap.service.load.report import Budget

if TYPE_CHECKING:
    from layertap.service.load.report import Report

DURATION_S = 10.0
ANSWER_S = 10.0
WIDTH = 120  # where the output is no terminal


def load(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")],
    scenario: Annotated[str, typer.Option(help="A YAML file, or digits, resnet50 or trouble.")] = "digits",
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second, whatever the server does; else closed loop.")
    ] = None,
    connections: Annotated[
        int | None, typer.Option(help="Closed loop: each sends its next request once it is answered; 16 without.")
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="Of an open loop.")] = "poisson",
    duration: Annotated[
        float | None, typer.Option(help=f"Seconds; {DURATION_S:g} where --requests is not given either.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help=f"At most; {MAX_REQUESTS:,} without.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests that are sent first and not counted.")] = 0,
    max_error_rate: Annotated[float, typer.Option(help="Status 1 where a greater share of requests failed.")] = 0.0,
    max_p99: Annotated[float | None, typer.Option(help="Status 1 where the p99 is more milliseconds.")] = None,
    allow: Annotated[list[int] | None, typer.Option(help="A status that is no failure, such as 429.")] = None,
    respect_retry_after: Annotated[
        bool, typer.Option("--respect-retry-after", help="Closed loop: wait as long as refusals say.")
    ] = False,
    max_in_flight: Annotated[
        int, typer.Option(help="Open loop: requests at once; what exceeds is not sent, and failed.")
    ] = Options.max_in_flight,
    timeout: Annotated[float, typer.Option(help="Seconds of connecting, sending, each read.")] = Options.timeout,
    seed: Annotated[int, typer.Option(help="The same seed draws the same requests and moments.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="A picture (.svg, .png …) of rates and latency over time.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="A .json file with all figures.")] = None,
) -> None:
    """Send requests to a server, and tell how it answers: a load test.

    In open loop latency counts from the moment a request was due, so a server that stalls can't hide it. Status 1: the
    error budget is broken. A key is taken from LAYERTAP_API_KEY.
    """
    from layertap.service.load.scenario import find_scenario

    kinds = find_scenario(scenario)
    try:
        if rate is not None and connections is not None:
            raise ValueError("give --rate or --connections, not both: a loop is open or closed")
        budget = Budget(max_error_rate, max_p99)
        options = Options(
            url=url,
            connections=Options.connections if connections is None else connections,
            rate=rate,
            arrivals=arrivals,
            max_in_flight=max_in_flight,
            requests=MAX_REQUESTS if requests is None else requests,
            duration=DURATION_S if requests is None and duration is None else duration,
            warmup=warmup,
            seed=seed,
            timeout=timeout,
            allow=frozenset(allow or ()),
            respect_retry_after=respect_retry_after,
            headers=_read_key(),
        )
    except ValueError as error:
        raise LayertapError(str(error)) from error
    for path in filter(None, (plot, out)):
        if not path.parent.is_dir():  # before the load, not after it
            raise LayertapError(f"there is no folder {path.parent}")
    from layertap.service.load.plot import check_plot, write_plot
    from layertap.service.load.report import make_document
    from layertap.service.load.run import run
    from layertap.service.load.tables import show_progress

    if plot is not None:
        check_plot(plot)
    _check_listening(options)
    with show_progress(stderr) as watch:
        figures = run(kinds, options, watch)
    _print(figures)
    if out is not None:
        document = make_document(shlex.join(["layertap", *sys.argv[1:]]), scenario, options, budget, figures)
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        write_plot(figures, scenario, plot)
    _judge(budget.find_breaches(figures.total))


def _read_key() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE} has characters that no header can hold: mind line breaks")
    return {"Authorization": f"Bearer {key}"}


def _check_listening(options: Options) -> None:
    """Any answer will do: better one clear message than thousands of failures."""
    import httpx

    try:
        httpx.get(f"{options.url.rstrip('/')}/livez", timeout=ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LayertapError(f"no answer from {options.url}: {error}") from error


def _print(report: Report) -> None:
    from rich.console import Console

    from layertap.service.load.tables import make_notes, make_tables

    wide = stdout if stdout.is_terminal else Console(width=WIDTH)
    for table in make_tables(report):
        wide.print(table)
    for note in make_notes(report):
        wide.print(note, highlight=False, markup=False)


def _judge(breaches: Sequence[str]) -> None:
    for breach in breaches:
        stderr.print(f"over budget: {breach}", markup=False, highlight=False, soft_wrap=True)
    if breaches:
        raise typer.Exit(1)
