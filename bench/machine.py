"""What a figure was measured on, without anything that names the machine or a folder of it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
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


def _cpu() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
