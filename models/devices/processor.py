"""What computes: the processor of a device, as far as code and times depend on it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

FEATURE_LINES = ("flags", "Features")  # of /proc/cpuinfo, on x86 and on ARM
MODEL_LINES = ("model name", "CPU implementer", "CPU part")


def describe_processor(device: torch.device) -> list[str]:
    """What code for one processor may not run on another for."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), _digest_cpu_lines(FEATURE_LINES)]


def describe_speed(device: torch.device) -> list[str]:
    """What forwards of one processor may take other times on another for."""
    return [*describe_processor(device), _digest_cpu_lines(MODEL_LINES), _read_quota()]


def _digest_cpu_lines(names: tuple[str, ...]) -> str:
    """What the system says of the first core, of some lines: each kind of processor has some of them."""
    try:
        first_core, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    lines = [line for line in first_core.splitlines() if line.startswith(names)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def _read_quota() -> str:
    """The share of the processor that a container has; empty where none is set, or nobody tells."""
    try:
        return Path("/sys/fs/cgroup/cpu.max").read_text().strip()
    except OSError:
        return ""
