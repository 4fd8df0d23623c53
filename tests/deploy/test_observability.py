"""The alarms and the dashboard of ``deploy/``: what promtool says, and whether there is what they ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"
DASHBOARD = ROOT / "deploy/grafana/layertap.json"
UNIT_TESTS = Path(__file__).parent / "alerts.test.yml"
METRICS = ROOT / "docs/reference/metrics.md"
NAME = re.compile(r"\blayertap_[a-z_]+\b")
CHOSEN, LABEL = re.compile(r"\b(layertap_[a-z_]+)\{([^}]*)\}"), re.compile(r"(\w+) *(?:=|!=|=~|!~)\"")


def list_rules() -> list[dict[str, Any]]:
    """Every alarm."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def list_queries() -> list[str]:
    """Every query of the dashboard, and of the pictures that its alarms leave in it."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*queries, *(each["expr"] for each in dashboard["annotations"]["list"])]


def list_documented() -> dict[str, set[str]]:
    """The labels of each name that a scrape has: of histograms, what Prometheus makes of them.

    ``tests/service/test_metrics.py`` compares the reference with a server's.
    """
    found: dict[str, set[str]] = {}
    row = r"^\| `(layertap_\w+)(?:{(.*)})?` \| (.*) \|$"
    for name, labels, what in re.findall(row, METRICS.read_text(), re.MULTILINE):
        parts = {"_bucket": {"le"}, "_sum": set(), "_count": set()} if what.startswith("histogram") else {"": set()}
        for part, more in parts.items():
            found[name + part] = {*re.findall(r"\w+", labels), "instance", "job", *more}
    return found


def find_tool(name: str) -> str:
    """The path of ``promtool``; the test is left out, visibly, where there is none."""
    return shutil.which(name) or pytest.skip(f"there is no {name}: Debian's package prometheus has it")


def run_tool(*words: str | Path) -> None:
    """promtool, which must find nothing wrong."""
    done = subprocess.run([find_tool("promtool"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names() -> None:
    """Alarms and dashboard name metrics and labels that there are; each alarm has a description and a unit test."""
    expressions = [*(rule["expr"] for rule in list_rules()), *list_queries()]
    assert len(expressions) > 40
    documented = list_documented()
    used = {name for expression in expressions for name in NAME.findall(expression)}
    assert used - documented.keys() == set()
    for name, chosen in (found for expression in expressions for found in CHOSEN.findall(expression)):
        assert set(LABEL.findall(chosen)) - documented[name] == set(), name
    assert all(rule["annotations"]["description"] for rule in list_rules())
    alarms = {rule["alert"] for rule in list_rules()}
    tested = {
        each["alertname"]
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for each in test["alert_rule_test"]
    }
    assert tested == alarms


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
