"""The figures for Prometheus: exact after known events, labels that callers can't choose, one set for each server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import configured, net, npy, raw, rows

STEPS = ("unpack", "parse", "load", "fetch", "decode", "queue", "forward", "copy", "encode")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
ROUNDING_S = 0.005 / 1000  # of a step in Server-Timing


@pytest.fixture
def server(serve: Serve) -> Iterator[Live]:
    """A server that nobody has asked for anything but whether it is ready."""
    with serve(configured(net("gated", "Gated"), net("touchy", "Touchy")), replicas=1, cpu_threads=1) as live:
        yield live


def scrape(live: Live) -> list[Metric]:
    """What a scraper reads."""
    return list(text_string_to_metric_families(live.client.get("/metrics").text))


def figures(live: Live) -> dict[str, float]:
    """Every sample by its name and labels: ``name{label=value,...}``."""
    found: dict[str, float] = {}
    for sample in (sample for family in scrape(live) for sample in family.samples):
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        key = f"{sample.name}{{{labels}}}" if labels else sample.name
        assert key not in found
        found[key] = sample.value
    return found


def counted(live: Live, **wanted: int) -> dict[str, float]:
    """The figures once so many requests of some routes have ended: a reply may be here before that."""

    def count(route: str) -> float:
        prefix = f"layertap_requests_total{{route={'' if route == 'other' else '/'}{route},"
        return sum(value for key, value in figures(live).items() if key.startswith(prefix))

    wait_until(lambda: all(count(route) >= total for route, total in wanted.items()))
    return figures(live)


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
        **{f"layertap_requests_total{{route=/extract,status={status}}}": 1 for status in (405, 413, 422, 500)},
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
        told = [re.search(rf"\b{step};dur=([\d.]+)", reply.headers["server-timing"]) for reply in replies]
        taken = [float(each[1]) / 1000 for each in told if each]
        least = 0 if step in ("fetch", "unpack", "load") else len(good)
        assert found[f"layertap_step_seconds_count{{step={step}}}"] == len(taken) >= least
        assert found[f"layertap_step_seconds_sum{{step={step}}}"] == pytest.approx(
            sum(taken), rel=0, abs=len(taken) * ROUNDING_S
        )


def test_labels(server: Live) -> None:
    """A scrape has every documented name and label, and no other; paths, methods and models that are not leave none."""
    assert post_rows(server).status_code == 200
    for method, path in (("GET", "/zzz"), ("GET", "/models/zzz/layers"), ("POST", "/models/zzz/load")):
        assert server.client.request(method, path).status_code == 404
    assert post_rows(server, model="zzz").status_code == 404
    assert server.client.request("ZZZ", "/models").status_code in (400, 405)
    counted(server, extract=2, other=1)
    reply = server.client.get("/metrics")
    assert reply.headers["content-type"] == prometheus_client.CONTENT_TYPE_LATEST
    assert "zzz" not in reply.text.lower()
    samples = {f"{each.name}_total" if each.type == "counter" else each.name: each.samples for each in scrape(server)}
    assert all(samples.values())
    labels = {name: {label for sample in found for label in sample.labels} for name, found in samples.items()}
    table = re.findall(r"^\| `(layertap_\w+)(?:{(.*)})?` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: set(re.findall(r"\w+", found)) for name, found in table}
    assert {name: found - {"le"} for name, found in labels.items()} == documented
    assert len(table) == len(documented)


def test_load(server: Live) -> None:
    """What a model has to do is told while it is so: what waits, what runs, how long that takes, up to which limits."""
    of = "{model=gated}"
    with ThreadPoolExecutor(1) as pool:
        with hold_model(server):
            waiting = pool.submit(post_rows, server, 5)
            wait_until(lambda: figures(server)[f"layertap_model_admitted_rows{of}"] == 6)
            wait_until(lambda: figures(server)[f"layertap_model_waiting_rows{of}"] == 5)
            found = figures(server)
        assert waiting.result().status_code == 200
    assert found[f"layertap_model_busy_replicas{of}"] == 1
    assert found[f"layertap_model_replicas{of}"] == len(server.engine.manager.handles["gated"].executor.devices)
    assert found[f"layertap_model_queue_seconds{of}"] > 0
    for name in ("max_queue_rows", "max_queue_bytes", "max_connections"):
        assert found[f"layertap_{name}"] == getattr(server.engine.settings, name)
    wait_until(lambda: server.engine.take_snapshot()["model_busy_replicas"]["gated"] == 0)
    idle = figures(server)
    names = ("admitted_rows", "waiting_rows", "queue_seconds", "busy_replicas")
    assert [idle[f"layertap_model_{name}{of}"] for name in names] == [0, 0, 0, 0]
