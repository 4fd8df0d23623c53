"""A run as it is kept: what was asked, of whom, when, and what came of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from layertap.service.load.options import Options
from layertap.service.load.report import Budget, Report
from layertap.service.version import get_version


@dataclass(frozen=True)
class Document:
    """Plain data for JSON and for the plot; no key is in it. ``date`` is UTC, ``client`` the load tester's machine."""

    command: str
    scenario: str
    date: str
    version: str
    client: Mapping[str, str | int | None]
    options: Mapping[str, object]
    budget: Budget
    breaches: list[str]
    results: Report


def make_document(command: str, scenario: str, options: Options, budget: Budget, report: Report) -> Document:
    """The document of a run that has just ended."""
    told = asdict(options)
    del told["headers"]  # the key
    return Document(
        command=command,
        scenario=scenario,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=get_version(),
        client={
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        options=told | {"allow": sorted(options.allow)},
        budget=budget,
        breaches=budget.find_breaches(report.total),
        results=report,
    )
