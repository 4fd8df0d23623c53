"""The figures for Prometheus: exact after known events, labels that callers can't choose, one set for each server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import configured, net, npy, raw, rows

ROUTES = {
    *("/extract", "/models", "/models/{name}", "/models/{name}/layers", "/models/{name}/load", "/models/{name}/unload"),
    *("/livez", "/readyz", "/metrics", "/", "other"),
}
STEPS = ("unpack", "parse", "load", "fetch", "decode", "queue", "forward", "copy", "encode")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
ROUNDING_S = 0.005 / 1000  # of a step in Server-Timing
Figures = Mapping[str, float]


@pytest.fixture
def server(serve: Serve) -> Iterator[Live]:
    """A server that nobody has asked for anything but whether it is ready."""
    with serve(configured(net("gated", "Gated"), net("touchy", "Touchy")), replicas=1, cpu_threads=1) as live:
        yield live


def families(text: str) -> list[Metric]:
    """What a scraper reads."""
    return list(text_string_to_metric_families(text))


def figures(text: str) -> Figures:
    """Every sample by its name and labels: ``name{label=value,...}``."""
    found: dict[str, float] = {}
    for family in families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def scraped(live: Live, **headers: str) -> str:
    """The figures of a server as text."""
    reply = live.client.get("/metrics", headers=headers)
    assert reply.status_code == 200
    return reply.text


def labelled(text: str, label: str) -> set[str]:
    """Every value of a label."""
    return {sample.labels[label] for family in families(text) for sample in family.samples if label in sample.labels}


def counted(live: Live, **wanted: int) -> Figures:
    """The figures once so many requests of some routes have ended: a reply may be here before that."""

    def ended() -> bool:
        found = families(scraped(live))
        samples = [each for family in found for each in family.samples if each.name == "layertap_requests_total"]
        return all(
            sum(each.value for each in samples if each.labels["route"].lstrip("/") == route) >= total
            for route, total in wanted.items()
        )

    wait_until(ended)
    return figures(scraped(live))


def durations(reply: httpx.Response) -> dict[str, float]:
    """The steps of a reply in seconds."""
    found = re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"])
    return {name: float(milliseconds) / 1000 for name, milliseconds in found}


def test_requests(server: Live) -> None:
    """Requests count by route and status, their bytes as sent, their steps with the times that replies have."""
    good = [post_rows(server, count) for count in (1, 2, 3)]
    bad = server.client.post("/extract", json={"layers": ["nowhere"], "inputs": []})
    failed = server.client.post("/extract", **raw(npy(rows(1, 1000)), "application/x-npy", layers=".", model="touchy"))
    large = post_rows(server, 20_000)  # comes in several pieces
    replies = [*good, bad, failed, large, server.client.get("/extract"), server.client.get("/nowhere")]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 422, 500, 413, 405, 404]
    found = counted(server, extract=7, other=1)
    of = {key: value for key, value in found.items() if "/extract" in key or "other" in key}
    assert {key: value for key, value in of.items() if key.startswith("layertap_requests_total")} == {
        "layertap_requests_total{route=/extract,status=200}": 3,
        "layertap_requests_total{route=/extract,status=422}": 1,
        "layertap_requests_total{route=/extract,status=500}": 1,
        "layertap_requests_total{route=/extract,status=413}": 1,
        "layertap_requests_total{route=/extract,status=405}": 1,
        "layertap_requests_total{route=other,status=404}": 1,
    }
    assert of["layertap_request_seconds_count{route=/extract}"] == 7
    assert of["layertap_request_seconds_sum{route=/extract}"] > 0
    for name, sizes in (
        ("request", [len(reply.request.read()) for reply in replies]),
        ("reply", [len(reply.content) for reply in replies]),
    ):
        assert of[f"layertap_{name}_bytes_total{{route=/extract}}"] == sum(sizes[:-1])
        assert of[f"layertap_{name}_bytes_total{{route=other}}"] == sizes[-1]
    for step in STEPS:
        taken = [durations(reply)[step] for reply in replies if step in durations(reply)]
        least = 0 if step in ("fetch", "unpack", "load") else len(good)
        assert found[f"layertap_step_seconds_count{{step={step}}}"] == len(taken) >= least
        assert found[f"layertap_step_seconds_sum{{step={step}}}"] == pytest.approx(
            sum(taken), rel=0, abs=len(taken) * ROUNDING_S
        )


def test_callers_choose_no_label(server: Live) -> None:
    """Paths, methods and model names that do not exist leave no trace."""
    for number in range(5):
        assert server.client.get(f"/zzz-{number}").status_code == 404
        assert server.client.get(f"/models/zzz-{number}").status_code == 404
        assert server.client.get(f"/models/zzz-{number}/layers").status_code == 404
        assert server.client.post(f"/models/zzz-{number}/load").status_code == 404
        assert post_rows(server, model=f"zzz-{number}").status_code == 404
        assert server.client.request(f"ZZZ-{number}", "/models").status_code in (400, 405)
        assert server.client.get("/livez", params={"zzz": str(number)}).status_code == 200
    counted(server, extract=5, other=5, livez=5)
    text = scraped(server)
    assert "zzz" not in text.lower()
    assert labelled(text, "route") <= ROUTES
    assert labelled(text, "model") <= {"digits", "gated", "touchy"}
    assert all(status.isdigit() for status in labelled(text, "status"))


def test_scrape(server: Live) -> None:
    """After real traffic a scrape has every documented name, with its labels, and none that is not documented."""
    assert post_rows(server).status_code == 200
    assert server.client.get("/nowhere").status_code == 404
    counted(server, extract=1, other=1)
    assert server.client.get("/metrics").headers["content-type"] == prometheus_client.CONTENT_TYPE_LATEST
    scrape = families(scraped(server))
    samples = {f"{each.name}_total" if each.type == "counter" else each.name: each.samples for each in scrape}
    assert all(samples.values())
    labels = {name: {label for sample in found for label in sample.labels} for name, found in samples.items()}
    assert {name: found - {"le"} for name, found in labels.items()} == documented()


def test_load(server: Live) -> None:
    """What a model has to do is told while it is so: what waits, what runs, how long that takes, up to which limits."""
    of = "{model=gated}"
    with ThreadPoolExecutor(1) as pool:
        with hold_model(server):
            waiting = pool.submit(post_rows, server, 5)
            wait_until(lambda: figures(scraped(server))[f"layertap_model_admitted_rows{of}"] == 6)
            wait_until(lambda: figures(scraped(server))[f"layertap_model_waiting_rows{of}"] == 5)
            found = figures(scraped(server))
        assert waiting.result().status_code == 200
    assert found[f"layertap_model_busy_replicas{of}"] == 1
    assert found[f"layertap_model_replicas{of}"] == len(server.engine.manager.handles["gated"].executor.devices)
    assert found[f"layertap_model_queue_seconds{of}"] > 0
    assert found["layertap_max_queue_rows"] == server.engine.settings.max_queue_rows
    assert found["layertap_max_queue_bytes"] == server.engine.settings.max_queue_bytes
    assert found["layertap_max_connections"] == server.engine.settings.max_connections
    wait_until(lambda: server.engine.take_snapshot().loads["gated"].busy_replicas == 0)
    idle = figures(scraped(server))
    names = ("admitted_rows", "waiting_rows", "queue_seconds", "busy_replicas")
    assert [idle[f"layertap_model_{name}{of}"] for name in names] == [0, 0, 0, 0]


def documented() -> dict[str, set[str]]:
    """Every name of the document's tables, and its labels."""
    table = re.findall(r"^\| `(layertap_\w+)` \| ([^|]*)\|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in table}
    assert len(table) == len(names)
    return names
