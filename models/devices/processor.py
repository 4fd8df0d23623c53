"""What computes: the processor of a device, as far as code and times depend on it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch


def describe_processor(device: torch.device) -> list[str]:
    """What code for one processor may not run on another for."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), _digest_cpu_line("flags")]


def describe_speed(device: torch.device) -> list[str]:
    """What forwards of one processor may take other times on another for."""
    return [*describe_processor(device), _digest_cpu_line("model name")]


def _digest_cpu_line(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return hashlib.sha256(next((line for line in lines if line.startswith(name)), "").encode()).hexdigest()[:8]
