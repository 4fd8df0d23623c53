"""``layertap load``."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from layertap.service.cli.console import say, show_status, tell


def load(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")],
    scenario: Annotated[str, typer.Option(help="A YAML file, or digits, resnet50 or trouble.")] = "digits",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, whatever the server does.")] = 10.0,
    duration: Annotated[float, typer.Option(min=0.001, help="Seconds in which requests are sent.")] = 10.0,
    max_error_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Status 1 where a greater share of requests failed.")
    ] = 0.0,
    max_p99: Annotated[float | None, typer.Option(help="Status 1 where the p99 is more milliseconds.")] = None,
    allow: Annotated[list[int] | None, typer.Option(help="A status that is no failure, such as 429.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds of connecting, sending, each read.")] = 60.0,
    out: Annotated[Path | None, typer.Option("--json", help="A .json file with all figures.")] = None,
) -> None:
    """Send requests to a server at random moments, and tell how it answers: a load test.

    Latency counts from the moment a request was due, so a server that stalls can't hide it. Status 1: the error budget
    is broken. A key is taken from LAYERTAP_API_KEY.
    """
    from layertap.service.clients import convert_errors
    from layertap.service.load.run import Sender, find_breaches, list_percentiles, summarize
    from layertap.service.load.scenario import find_scenario
    from layertap_client import Client

    kinds = find_scenario(scenario)
    with convert_errors(url), Client(url) as client:
        client.models()  # one clear message is better than thousands of failures
        sender = Sender(kinds, url, timeout, allow or ())
    begun = time.perf_counter()
    with show_status(f"sending for {duration:g} s"), suppress(KeyboardInterrupt):
        asyncio.run(sender.send_at(rate, duration))
    elapsed_s = time.perf_counter() - begun
    results = {each.name: summarize([it for it in sender.samples if it.kind is each], elapsed_s) for each in kinds}
    results["total"] = total = summarize(sender.samples, elapsed_s)
    for name, figures in results.items():
        outcomes = ", ".join(f"{outcome} × {count}" for outcome, count in figures.outcomes.items())
        say(f"{name}: {figures.goodput:.1f}/s good, {_format_ms(figures.latency_ms)}; {outcomes or 'none sent'}")
    late = _format_ms(list_percentiles(each.late for each in sender.samples))
    say(f"{total.failed} of {total.requests} failed in {elapsed_s:.1f} s; sent after their moments: {late}")
    breaches = find_breaches(total, max_error_rate, max_p99)
    if out is not None:
        document: dict[str, Any] = {"scenario": scenario, "rate": rate, "elapsed_s": elapsed_s, "breaches": breaches}
        document["results"] = {name: asdict(figures) for name, figures in results.items()}
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for breach in breaches:
        tell(f"over budget: {breach}")
    if breaches:
        raise typer.Exit(1)


def _format_ms(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} ms" for name, value in percentiles.items()) or "no answer"
