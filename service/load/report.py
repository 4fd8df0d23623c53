"""What a run gave, as it is kept, and what it may have cost."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from layertap.service.load.figures import Figures, Spread
from layertap.service.load.options import Options
from layertap.service.load.timeline import Interval
from layertap.service.version import get_version


@dataclass(frozen=True)
class Report:
    """Figures of all requests and of each kind, and over the run.

    ``client_cpu`` is CPU-seconds a second of the client's own process: near 1, it was the limit. ``late_ms``: in open
    loop, how long after their moments requests were sent.
    """

    total: Figures
    kinds: dict[str, Figures]
    elapsed_s: float
    client_cpu: float
    late_ms: Spread | None
    interrupted: bool
    timeline: list[Interval]

    @property
    def ok(self) -> bool:
        """Whether every request that the client waited for was answered, and as expected or allowed."""
        return not self.total.unexpected and not self.total.errors


@dataclass(frozen=True)
class Budget:
    """What a run may have: failed requests as a share of all that were due (0 to 1), and the 99th percentile."""

    max_error_rate: float = 0.0
    max_p99_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"--max-error-rate is {self.max_error_rate:g}, and should be a share from 0 to 1")
        if self.max_p99_ms is not None and not self.max_p99_ms > 0:
            raise ValueError(f"--max-p99 is {self.max_p99_ms:g}, and should be milliseconds, greater than 0")

    def find_breaches(self, total: Figures) -> list[str]:
        """A line for each part that is broken, no line where all is kept."""
        due = total.requests + total.not_sent
        if not due:
            return ["no request was counted"]
        breaches = []
        if total.error_rate > self.max_error_rate:
            share = f"{total.failed} of {due} requests failed, a share of {total.error_rate:.3g}"
            breaches.append(f"{share}; --max-error-rate allows {self.max_error_rate:g}")
        if self.max_p99_ms is not None:
            p99 = total.latency_ms.p99 if total.latency_ms else None
            if p99 is None or p99 > self.max_p99_ms:
                told = "there is no answer to take a p99 of" if p99 is None else f"p99 is {p99:.1f} ms"
                breaches.append(f"{told}; --max-p99 allows {self.max_p99_ms:g} ms")
        return breaches


def make_document(
    command: str, scenario: str, options: Options, budget: Budget, report: Report
) -> Mapping[str, object]:
    """A run that has just ended as plain data for JSON: what was asked, of whom, when, what came of it; no key."""
    told = {name: value for name, value in asdict(options).items() if name != "headers"}  # these have the key
    return {
        "command": command,
        "scenario": scenario,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": get_version(),
        "client": {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "options": told | {"allow": sorted(options.allow)},
        "budget": asdict(budget),
        "breaches": budget.find_breaches(report.total),
        "results": asdict(report),
    }
