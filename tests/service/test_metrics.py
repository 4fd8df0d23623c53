"""The figures for Prometheus: exact after known events, labels that callers can't choose, one set for each server."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import get_args

import httpx
import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from layertap.service.metrics import BatchReason, Cause, Metrics, ModelLoad, Reason, Snapshot
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import configured, net, npy, picture, problem, raw, rows

ROUTES = {
    *("/extract", "/models", "/models/{name}", "/models/{name}/layers", "/models/{name}/load", "/models/{name}/unload"),
    *("/livez", "/readyz", "/metrics", "/", "other"),
}
LABELS = {"route", "status", "step", "model", "why", "reason", "result", "cause", "task", "state", "device"}
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


def nonzero(metrics: Metrics) -> dict[str, float]:
    """What is not 0 of one set of figures."""
    return {key: value for key, value in figures(metrics.render().decode()).items() if value}


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


def test_packed_body(server: Live) -> None:
    """What it took to unpack a body is a step like others."""
    request = raw(gzip.compress(npy(rows(1))), "application/x-npy", layers="linear", model="gated")
    request["headers"] |= {"content-encoding": "gzip"}
    reply = server.client.post("/extract", **request)
    assert reply.status_code == 200, reply.text
    found = counted(server, extract=1)
    assert found["layertap_step_seconds_count{step=unpack}"] == 1
    assert found["layertap_step_seconds_sum{step=unpack}"] == pytest.approx(durations(reply)["unpack"], abs=ROUNDING_S)


def test_own_scrapes(server: Live) -> None:
    """A scrape counts as a request too, once it has ended."""
    key = "layertap_requests_total{route=/metrics,status=200}"
    assert key not in figures(scraped(server))
    wait_until(lambda: figures(scraped(server)).get(key, 0) >= 3)


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


def test_key(serve: Serve) -> None:
    """A key is needed as for other routes, any that is good; who is refused counts by route and status."""
    with serve(configured(), api_keys="user-key", admin_keys="admin-key") as live:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            problem(live.client.get("/metrics", headers=headers), 401)
        assert live.client.get("/metrics", headers={"x-api-key": "user-key"}).status_code == 200
        refused = (("POST", "/models/reload"), ("POST", "/extract"), ("GET", "/extract"), ("HEAD", "/models/x/layers"))
        for method, path in (*refused, ("GET", "/nowhere"), ("POST", "/v2/models/x/infer")):
            assert live.client.request(method, path).status_code == 401
        found = {"/models/reload", "/extract", "/models/{name}/layers", "/v2/models/{name}/infer", "other"}
        counts = figures(scraped(live, authorization="Bearer admin-key"))
        for route in found:
            number = 2 if route == "/extract" else 1
            assert counts[f"layertap_requests_total{{route={route},status=401}}"] == number
        assert counts["layertap_requests_total{route=/metrics,status=401}"] == 3


def test_servers_do_not_mix(serve: Serve) -> None:
    """Each server of a process has figures of its own; the library's global ones have none of ours."""
    with serve(configured(net("gated", "Gated"))) as one, serve(configured(net("gated", "Gated"))) as other:
        assert post_rows(one).status_code == 200
        assert counted(one, extract=1)["layertap_requests_total{route=/extract,status=200}"] == 1
        assert "/extract" not in labelled(scraped(other), "route")
    assert b"layertap" not in prometheus_client.generate_latest()


def test_exposition(server: Live) -> None:
    """What is served is Prometheus' text, under names by the rules, each with a type and a help."""
    assert post_rows(server).status_code == 200
    counted(server, extract=1)
    reply = server.client.get("/metrics")
    assert reply.headers["content-type"] == prometheus_client.CONTENT_TYPE_LATEST
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found = families(reply.text)
    assert len({family.name for family in found}) == len(found) > 10
    for family in found:
        check_name(family)
        assert family.documentation.endswith(".")
        assert {label for sample in family.samples for label in sample.labels} <= LABELS | {"le"}


def check_name(family: Metric) -> None:
    """By the rules: our prefix, a unit that says what is counted or measured, ``_total`` on counters alone."""
    assert re.fullmatch(r"layertap_[a-z]+(_[a-z]+)*", family.name)
    assert family.type in ("counter", "histogram", "gauge")
    if family.type == "counter":  # the parser takes _total off the family's name
        assert {sample.name for sample in family.samples} <= {f"{family.name}_total"}
    else:
        assert family.name.endswith(
            (
                "_seconds",
                "_bytes",
                "_rows",
                "_requests",
                "_ratio",
                "_state",
                "_hooks",
                "_connections",
                "_replicas",
                "_slots",
            )
        )
    assert not [sample.name for sample in family.samples if sample.name.endswith("_created")]


def test_documented() -> None:
    """Every name is in the document's tables with its labels, and no other is."""
    metrics = everything()
    found: dict[str, set[str]] = {}
    for family in families(metrics.render().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    assert documented() == found


def test_scrape(server: Live) -> None:
    """After real traffic a scrape has every documented name, with its labels, and none that is not documented."""
    assert post_rows(server).status_code == 200
    assert server.client.get("/nowhere").status_code == 404
    counted(server, extract=1, other=1)
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


def test_busy_seconds(server: Live) -> None:
    """How long cores were busy for a model is there, decoding too: at most as replies told it, on all cores."""
    replies = [server.client.post("/extract", **raw(picture(seed), "image/png", layers="head")) for seed in range(3)]
    counted(server, extract=3)
    found = figures(scraped(server))
    slots = found["layertap_device_slots{device=cpu}"]
    assert slots == server.engine.settings.cpu_threads
    told = sum(durations(reply)["decode"] for reply in replies)
    forwards = found["layertap_forward_seconds_sum{model=digits}"]
    busy = found["layertap_busy_seconds_total{device=cpu,model=digits}"]
    assert forwards < busy <= slots * forwards + told + 3 * ROUNDING_S


def documented() -> dict[str, set[str]]:
    """Every name of the document's tables, and its labels."""
    table = re.findall(r"^\| `(layertap_\w+)` \| ([^|]*)\|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in table}
    assert len(table) == len(names)
    return names


def everything() -> Metrics:
    """Figures where every series has begun."""
    metrics = Metrics()
    metrics.observe_request("/extract", 200, 0.0, {}, 0, 0)
    metrics.count_answered("digits", 1)
    metrics.add_busy_seconds("digits", "cpu", 1.0)
    snapshot = Snapshot(
        queue_rows=1,
        queue_bytes=2,
        running_rows=3,
        states={"digits": "ready"},
        hooks={"digits": 0},
        max_batch_rows={"digits": 32},
        cache_bytes=4,
        memory_bytes={"digits": 5},
        loads={"digits": ModelLoad()},
        device_slots={"cpu": 1},
    )
    metrics.register_gauges(lambda: snapshot)
    return metrics


def test_not_in_the_interface(server: Live) -> None:
    """The route stands in no OpenAPI document, and takes GET alone."""
    assert "/metrics" not in server.client.get("/openapi.json").json()["paths"]
    problem(server.client.post("/metrics"), 405)


def test_request() -> None:
    """Each figure of a request; steps come in milliseconds, and those that are not known are left out."""
    metrics = Metrics()
    metrics.observe_request("/extract", 200, 0.25, {"parse": 2.0, "queue": 500.0, "total": 9.0, "zzz": 9.0}, 100, 1000)
    found = nonzero(metrics)
    assert {key: value for key, value in found.items() if "_bucket" not in key} == {
        "layertap_requests_total{route=/extract,status=200}": 1,
        "layertap_request_seconds_count{route=/extract}": 1,
        "layertap_request_seconds_sum{route=/extract}": 0.25,
        "layertap_request_bytes_total{route=/extract}": 100,
        "layertap_reply_bytes_total{route=/extract}": 1000,
        "layertap_step_seconds_count{step=parse}": 1,
        "layertap_step_seconds_sum{step=parse}": 0.002,
        "layertap_step_seconds_count{step=queue}": 1,
        "layertap_step_seconds_sum{step=queue}": 0.5,
    }
    assert edges(found, "layertap_step_seconds", "step=parse") == [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30]
    assert edges(found, "layertap_step_seconds", "step=queue") == [1, 3, 10, 30]
    assert labelled(metrics.render().decode(), "step") == set(STEPS)


def edges(found: Figures, name: str, label: str) -> list[float]:
    """The finite bounds of a histogram's buckets that something fell below."""
    pattern = re.compile(rf"{name}_bucket{{le=([\d.]+),{label}}}")
    return sorted(float(match[1]) for key in found if (match := pattern.fullmatch(key)))


def test_batch() -> None:
    """Each figure of a forward, with the buckets it falls into."""
    metrics = Metrics()
    metrics.observe_batch("digits", rows=8, max_rows=32, requests=3, depth=0.5, seconds=0.02, why="same_depth")
    found = nonzero(metrics)
    of = "{model=digits}"
    assert {key: value for key, value in found.items() if "_bucket" not in key} == {
        "layertap_batches_total{model=digits,why=same_depth}": 1,
        f"layertap_batch_rows_count{of}": 1,
        f"layertap_batch_rows_sum{of}": 8,
        f"layertap_batch_fill_ratio_count{of}": 1,
        f"layertap_batch_fill_ratio_sum{of}": 0.25,
        f"layertap_batch_requests_count{of}": 1,
        f"layertap_batch_requests_sum{of}": 3,
        f"layertap_stop_depth_ratio_count{of}": 1,
        f"layertap_stop_depth_ratio_sum{of}": 0.5,
        f"layertap_forward_seconds_count{of}": 1,
        f"layertap_forward_seconds_sum{of}": 0.02,
    }
    assert edges(found, "layertap_batch_rows", "model=digits") == [8, 16, 32, 64, 128]
    assert edges(found, "layertap_batch_requests", "model=digits") == [4, 8, 16, 32, 64, 128]
    assert edges(found, "layertap_batch_fill_ratio", "model=digits") == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert edges(found, "layertap_stop_depth_ratio", "model=digits") == [0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert edges(found, "layertap_forward_seconds", "model=digits") == [0.03, 0.1, 0.3, 1, 3, 10, 30]


def test_whole_range() -> None:
    """One row alone and a full batch fall into the outermost finite buckets."""
    metrics = Metrics()
    metrics.observe_batch("digits", rows=1, max_rows=1, requests=1, depth=1.0, seconds=0.0, why="isolated")
    found = nonzero(metrics)
    assert edges(found, "layertap_batch_rows", "model=digits") == [1, 2, 4, 8, 16, 32, 64, 128]
    assert edges(found, "layertap_batch_fill_ratio", "model=digits") == [1]
    assert edges(found, "layertap_stop_depth_ratio", "model=digits") == [1]


def test_counters() -> None:
    """Each event counts once, where it belongs."""
    metrics = Metrics()
    metrics.count_answered("digits", 5)
    metrics.count_answered("digits", 2)
    metrics.count_expired("digits")
    metrics.count_cancelled("gated")
    metrics.count_out_of_memory("gated", 1)
    for cause in get_args(Cause):
        metrics.count_splits("gated", cause, 1)
    for reason in get_args(Reason):
        metrics.count_refused(reason)
    assert nonzero(metrics) == {
        "layertap_rows_total{model=digits}": 7,
        "layertap_expired_total{model=digits}": 1,
        "layertap_cancelled_total{model=gated}": 1,
        "layertap_out_of_memory_total{model=gated}": 1,
        "layertap_split_total{cause=memory,model=gated}": 1,
        "layertap_split_total{cause=error,model=gated}": 1,
        "layertap_refused_total{reason=queue_rows}": 1,
        "layertap_refused_total{reason=queue_bytes}": 1,
        "layertap_refused_total{reason=deadline}": 1,
    }


def test_series_begin_at_zero() -> None:
    """What may be counted of a model is there from its first event on: a rate needs a value before the first."""
    metrics = Metrics()
    empty = figures(metrics.render().decode())
    assert {f"layertap_refused_total{{reason={reason}}}" for reason in get_args(Reason)} <= set(empty)
    metrics.count_answered("digits", 1)
    found = figures(metrics.render().decode())
    assert {f"layertap_batches_total{{model=digits,why={why}}}" for why in get_args(BatchReason)} <= set(found)
    assert {f"layertap_split_total{{cause={cause},model=digits}}" for cause in get_args(Cause)} <= set(found)
    assert found["layertap_expired_total{model=digits}"] == 0


def test_gauges() -> None:
    """Gauges are read at each scrape and at no other time; only one may give them."""
    metrics = Metrics()
    queued = iter((1, 7))
    metrics.register_gauges(
        lambda: Snapshot(next(queued), 2, 3, {"digits": "ready", "gated": "loading"}, {"digits": 4}, {"digits": 32})
    )
    rest = {
        "layertap_queue_bytes": 2,
        "layertap_running_rows": 3,
        "layertap_model_state{model=digits,state=ready}": 1,
        "layertap_model_state{model=gated,state=loading}": 1,
        "layertap_model_hooks{model=digits}": 4,
        "layertap_batch_ceiling_rows{model=digits}": 32,
    }
    assert nonzero(metrics) == rest | {"layertap_queue_rows": 1}
    assert nonzero(metrics) == rest | {"layertap_queue_rows": 7}
    with pytest.raises(ValueError, match="layertap_queue_rows"):
        metrics.register_gauges(Snapshot)


def test_threads() -> None:
    """Nothing is lost or made twice where many threads begin and count the same series at once."""
    metrics, threads, times = Metrics(), 8, 200
    start = Barrier(threads)

    def count(_: int) -> None:
        start.wait()
        for number in range(times):
            metrics.observe_batch(f"model-{number % 4}", 2, 4, 1, 0.5, 0.25, "single")
            metrics.observe_request("/extract", 200, 0.25, {"queue": 250.0}, 1, 2)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(count, range(threads)))
    found, total = nonzero(metrics), threads * times
    assert found["layertap_requests_total{route=/extract,status=200}"] == total
    assert found["layertap_reply_bytes_total{route=/extract}"] == 2 * total
    assert found["layertap_step_seconds_sum{step=queue}"] == total / 4
    for number in range(4):
        assert found[f"layertap_batches_total{{model=model-{number},why=single}}"] == total / 4
        assert found[f"layertap_batch_rows_sum{{model=model-{number}}}"] == total / 2
