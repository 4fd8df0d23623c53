"""``layertap load``."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from layertap.models.errors import LayertapError
from layertap.service.cli.console import stderr, stdout
from layertap.service.load.options import MAX_REQUESTS, Options

DURATION_S = 10.0
ANSWER_S = 10.0
WIDTH = 120  # where the output is no terminal


def load(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")],
    scenario: Annotated[str, typer.Option(help="A YAML file, or digits, resnet50 or trouble.")] = "digits",
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: requests a second, whatever the server does.")
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: each sends its next request once it is answered; 16 without."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help=f"Seconds; {DURATION_S:g} where --requests is not given either.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_REQUESTS, help=f"At most; {MAX_REQUESTS:,} without.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests that are sent first and not counted.")] = 0,
    max_error_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Status 1 where a greater share of requests failed.")
    ] = 0.0,
    max_p99: Annotated[float | None, typer.Option(help="Status 1 where the p99 is more milliseconds.")] = None,
    allow: Annotated[list[int] | None, typer.Option(help="A status that is no failure, such as 429.")] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Open loop: requests at once; what exceeds is not sent, and failed.")
    ] = Options.max_in_flight,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds of connecting, sending, each read.")
    ] = Options.timeout,
    seed: Annotated[int, typer.Option(help="The same seed draws the same requests and moments.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="A picture (.svg, .png …) of rates and latency over time.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="A .json file with all figures.")] = None,
) -> None:
    """Send requests to a server, and tell how it answers: a load test.

    In open loop latency counts from the moment a request was due, so a server that stalls can't hide it. Status 1: the
    error budget is broken. A key is taken from LAYERTAP_API_KEY.
    """
    from layertap.service.clients import convert_errors
    from layertap.service.load.figures import find_breaches
    from layertap.service.load.report import check_plot, make_document, make_watch, print_report, write_plot
    from layertap.service.load.run import run
    from layertap.service.load.scenario import find_scenario
    from layertap_client.transport import make_key_header

    if rate is not None and connections is not None:
        raise LayertapError("give --rate or --connections, not both: a loop is open or closed")
    if "@" in urlsplit(url).netloc:
        raise LayertapError("the URL holds a name or a password, which would stand in reports: leave it out")
    with convert_errors(url):
        headers = make_key_header()
    options = Options(
        url=url,
        connections=connections or Options.connections,
        rate=rate,
        max_in_flight=max_in_flight,
        requests=requests or MAX_REQUESTS,
        duration=DURATION_S if requests is None and duration is None else duration,
        warmup=warmup,
        seed=seed,
        timeout=timeout,
        allow=frozenset(allow or ()),
        headers=headers,
    )
    kinds = find_scenario(scenario)
    for path in filter(None, (plot, out)):
        if not path.parent.is_dir():  # before the load, not after it
            raise LayertapError(f"there is no folder {path.parent}")
    if plot is not None:
        check_plot(plot)
    _check_listening(options)
    done = run(kinds, options, make_watch(stderr))
    print_report(done, stdout if stdout.is_terminal else Console(width=WIDTH))
    breaches = find_breaches(done.total, max_error_rate, max_p99)
    if out is not None:
        out.write_text(json.dumps(make_document(done, scenario, breaches), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        write_plot(done, scenario, plot)
    for breach in breaches:
        stderr.print(f"over budget: {breach}", highlight=False, soft_wrap=True)
    if breaches:
        raise typer.Exit(1)


def _check_listening(options: Options) -> None:
    """Better one clear message than thousands of failures: any answer will do that asks for no other key."""
    import httpx

    url = options.url

    try:
        reply = httpx.get(f"{url.rstrip('/')}/models", headers=options.headers, timeout=ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "give an address like http://127.0.0.1:8000"
        raise LayertapError(f"no answer from {url}: {error}", hint=hint) from error
    if reply.status_code == HTTPStatus.UNAUTHORIZED:
        raise LayertapError(f"{url} asks for another key", hint="set LAYERTAP_API_KEY to one that it knows")
