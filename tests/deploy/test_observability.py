"""The alarms and the dashboard of ``deploy/``: checked by promtool, and by a real Prometheus in a staged overload."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.prometheus import Prometheus, find_tool, running
from tests.service.gated_server import TRIES, TRY_S, wait_until
from tests.service.load_server import Process, process
from tests.service.server_process import fatal_model_spec
from tests.service.support import net, npy, raw, rows

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"
DASHBOARD = ROOT / "deploy/grafana/layertap.json"
UNIT_TESTS = Path(__file__).parent / "alerts.test.yml"
METRICS = ROOT / "docs/reference/metrics.md"
NAME = re.compile(r"\blayertap_[a-z_]+\b")
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*", "$model": ".*"}  # of Grafana

CLIENTS, ROWS_EACH = 24, 8  # together more rows than the queue holds, each of which takes 0.05 s
CONNECTIONS = 32  # a few more than these clients, Prometheus and this test have
SETTINGS = {
    "LAYERTAP_WORKERS": "0",
    "LAYERTAP_CPU_THREADS": "1",
    "LAYERTAP_REPLICAS": "1",
    "LAYERTAP_MAX_QUEUE_ROWS": "160",
    "LAYERTAP_MAX_CONNECTIONS": str(CONNECTIONS),
    "LAYERTAP_API_KEYS": "crowd-key # crowd, scrape-key # prometheus",
}
KEY = {"x-api-key": "crowd-key"}
AFTER_END = {"LayertapDown"}
NOT_STAGED = {"LayertapWorkersRestart", "LayertapOutOfMemory"}  # their unit tests alone show them


def list_rules() -> list[dict[str, Any]]:
    """Every alarm."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def list_queries() -> list[str]:
    """Every query of the dashboard, and of the pictures that its alarms leave in it."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*queries, *(each["expr"] for each in dashboard["annotations"]["list"])]


def list_documented() -> set[str]:
    """The names that a scrape has: those of the reference, of histograms with what Prometheus makes of them."""
    names = set()
    for name, what in re.findall(r"^\| `(layertap_\w+)` \|[^|]*\| (.*) \|$", METRICS.read_text(), re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if what.startswith("histogram") else {name}
    return names


def run_tool(*words: str | Path) -> None:
    """promtool, which must find nothing wrong."""
    done = subprocess.run([find_tool("promtool"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names() -> None:
    """Alarms and dashboard name metrics that there are, and each alarm has a description and a unit test."""
    expressions = [*(rule["expr"] for rule in list_rules()), *list_queries()]
    assert len(expressions) > 40
    used = {name for expression in expressions for name in NAME.findall(expression)}
    assert used - list_documented() == set()
    assert all(rule["annotations"]["description"] for rule in list_rules())
    alarms = {rule["alert"] for rule in list_rules()}
    tested = {
        each["alertname"]
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for each in test["alert_rule_test"]
    }
    assert tested == alarms


def test_dashboard() -> None:
    """Panels have numbers of their own and do not overlap; every one says what it asks of which source."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    for file in sorted((ROOT / "deploy/grafana/provisioning").rglob("*.yml")):
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1


@pytest.mark.slow
def test_rules() -> None:
    """Promtool takes the alarms, and each fires for what it should, and for nothing less."""
    run_tool("check", "rules", ALERTS)
    run_tool("test", "rules", UNIT_TESTS)


@pytest.mark.slow
def test_config(tmp_path: Path) -> None:
    """Promtool takes the configuration, with its files beside it."""
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    (key := tmp_path / "layertap.key").write_text("scrape-key")
    text = CONFIG.read_text()
    assert "/etc/prometheus/layertap.key" in text
    (copy := tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/layertap.key", str(key)))
    run_tool("check", "config", copy)


def write_hasty_config(folder: Path, server: Process) -> Path:
    """The configuration as it is but for the target, with seconds in place of minutes, for a test that waits."""
    (key := folder / "layertap.key").write_text("scrape-key\n")
    text = CONFIG.read_text().replace("15s", "2s").replace("/etc/prometheus/layertap.key", str(key))
    config = folder / "prometheus.yml"
    config.write_text(text.replace("layertap:8000", httpx.URL(server.url).netloc.decode()))
    hasty = re.sub(r"\[\d+m\]", "[15s]", re.sub(r"for: \d+m", "for: 2s", ALERTS.read_text()))
    assert "m]" not in hasty
    (folder / "alerts.yml").write_text(hasty)
    return config


@contextmanager
def overload(server: Process) -> Iterator[None]:
    """More than a server can do until the block ends: too many rows, requests that fail, too many connections."""
    over = threading.Event()
    work = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: work.run_until_complete(_send_too_much(server.url, over)))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(TRIES * TRY_S)
        work.close()


async def _send_too_much(url: str, over: threading.Event) -> None:
    many = raw(npy(rows(ROWS_EACH)), "application/x-npy", layers="linear", model="unhurried", format="npy")
    failing = raw(npy(rows(1, 1000)), "application/x-npy", layers="linear", model="touchy", format="npy")
    limits = httpx.Limits(max_connections=CLIENTS + 1, max_keepalive_connections=CLIENTS + 1)

    async def send(client: httpx.AsyncClient, request: dict[str, Any]) -> None:
        while not over.is_set():
            with suppress(httpx.TransportError):
                reply = await client.post("/extract", **(request | {"headers": request["headers"] | KEY}))
                assert reply.status_code in (200, 429, 500, 503)
                await asyncio.sleep(0.0 if reply.status_code == 200 else 1.0)

    async def connect() -> None:
        """Now and then as many connections as the server may have, on top of all others."""
        while not over.is_set():
            await asyncio.to_thread(_open_connections, httpx.URL(url))
            await asyncio.sleep(1.0)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(send(client, many) for _ in range(CLIENTS)), send(client, failing), connect())


def _open_connections(url: httpx.URL) -> None:
    with ExitStack() as opened, suppress(OSError):
        for _ in range(CONNECTIONS):
            opened.enter_context(socket.create_connection((url.host, url.port or 80), timeout=5))


def check_data(prometheus: Prometheus) -> None:
    """Every documented metric was scraped, and every query of alarms and dashboard finds something."""
    scraped = set(prometheus.ask("label/__name__/values"))
    assert list_documented() - scraped == set()
    assert {name for name in scraped if name.startswith("layertap_")} - list_documented() == set()
    sides = [re.sub(r" (?:[<>]|==) [\d.]+$", "", rule["expr"]) for rule in list_rules()]
    for query in [*sides, *list_queries()]:
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        wait_until(lambda query=query: bool(prometheus.query(query)))  # there is nothing while a scrape is late


@pytest.mark.slow
def test_staged_overload(tmp_path: Path) -> None:
    """A real Prometheus that scrapes a real server raises the alarms of an overload alone; no query finds nothing."""
    find_tool("prometheus")
    specs = [fatal_model_spec("Unhurried"), net("touchy", "Touchy"), net("never", "Never", required=False)]
    expected = {rule["alert"] for rule in list_rules()} - AFTER_END - NOT_STAGED
    with ExitStack() as opened:
        server = opened.enter_context(process(specs, tmp_path, **SETTINGS))
        prometheus = opened.enter_context(running(write_hasty_config(tmp_path, server), tmp_path))
        wait_until(lambda: prometheus.list_firing() == {"LayertapModelFailed"})
        with overload(server):
            raised: set[str] = set()

            def has_raised_all() -> bool:
                raised.update(prometheus.list_firing())
                return raised >= expected

            with suppress(AssertionError):
                wait_until(has_raised_all)
            assert raised - AFTER_END == expected  # a scrape may be late where the machine is slow
            check_data(prometheus)
        assert server.end() == 0
        wait_until(lambda: "LayertapDown" in prometheus.list_firing())
