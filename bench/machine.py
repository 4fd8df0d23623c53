"""What a figure was measured on, and who else used it; nothing names the machine or a folder of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
DISTRIBUTIONS = ("torch", "torchvision", "numpy", "uvicorn", "fastapi")


def described() -> dict[str, object]:
    """Date (UTC), processor, cores, load before the run, operating system, Python and the versions that matter."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in DISTRIBUTIONS},
    }


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since they started: used by processes, taken away by the host, and in all."""

    used: float
    stolen: float
    total: float


def parse_cpu_times(stat: str) -> CpuTimes:
    """From ``/proc/stat``; a guest's time, which follows there, is part of the user's."""
    user, nice, system, idle, iowait, irq, softirq, stolen = (TICK_S * int(word) for word in stat.split()[1:9])
    used = user + nice + system + irq + softirq
    return CpuTimes(used, stolen, used + idle + iowait + stolen)


def get_cpu_shares(before: CpuTimes, after: CpuTimes, measured_s: float) -> dict[str, float]:
    """Shares of all cores' time between two readings, 0 to 1 in thousandths.

    ``steal`` is what the host took away, ``others`` what processes of this machine used beside those that are measured,
    which used ``measured_s``.
    """
    total = after.total - before.total
    others = after.used - before.used - measured_s
    return {"steal": round((after.stolen - before.stolen) / total, 3), "others": round(max(others, 0.0) / total, 3)}


class CpuMeter:
    """Who used the cores from now on; ``measured`` gives the CPU seconds so far of what is measured."""

    def __init__(self, measured: Callable[[], float]) -> None:
        self._measured = measured
        self._measured_s, self._times = measured(), parse_cpu_times(STAT.read_text())

    def get_shares(self) -> dict[str, float]:
        """As ``get_cpu_shares``."""
        return get_cpu_shares(self._times, parse_cpu_times(STAT.read_text()), self._measured() - self._measured_s)


def _cpu() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
