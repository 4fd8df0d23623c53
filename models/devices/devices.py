"""Devices: their names in a configuration, their processors, threads and dtypes."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.grammar import parse_device, parse_devices

FEATURE_LINES = ("flags", "Features")  # of /proc/cpuinfo, on x86 and on ARM
TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
FLOATS = ("float32", "float16", "bfloat16", "float64")
# The dtypes of requests and replies.
DTYPES = {name: TORCH_DTYPES[name] for name in (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "bool")}
# By precision, relative to a tensor's largest number: the most that kernels, batch sizes and padding change a value.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


@label_failures("device")
def resolve_device(name: str) -> torch.device:
    """The device that a configuration names; LoadError if it does not exist.

    ``auto`` is the GPU with the most free memory, or the CPU if there is no GPU.
    """
    if name == "auto":
        return _choose_device()
    kind, index = parse_device(name)
    if kind == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise LoadError(f"there is no device {escape(name)} on this machine", hint="use auto or cpu")
    return torch.device("cuda", index)


@label_failures("device")
def list_devices(names: Sequence[str]) -> tuple[str, ...]:
    """The full names of several devices, ``cuda:0``; ``all`` is every GPU. LoadError if one does not exist."""
    devices = parse_devices(names) or tuple(("cuda", index) for index in range(torch.cuda.device_count()))
    if not devices:
        raise LoadError("there is no GPU on this machine", hint="use device: auto or cpu")
    listed = tuple(f"{kind}:{index}" for kind, index in devices)
    for name in listed:
        resolve_device(name)
    return listed


def _choose_device() -> torch.device:
    """The GPU with the most free memory, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:  # querying a GPU takes some of its memory
        return torch.device("cuda", max(range(count), key=lambda index: torch.cuda.mem_get_info(index)[0]))
    return torch.device("cuda", 0) if count else torch.device("cpu")


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device this thread's current one until the block ends: compiled graphs use its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 (10 bits of mantissa) in float32 matmuls and convolutions on GPUs, for the whole process.

    torch's default allows it in convolutions, so that results would differ from a forward in full float32.
    """
    # These set the newer ``fp32_precision`` too; setting that instead would make reading these, as compilers do, fail.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some versions warn about the newer setting
        torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cuda.matmul.allow_tf32 = allowed


def count_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let this thread's operations use ``count`` threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def describe_processor(device: torch.device) -> list[str]:
    """The features that decide whether code compiled for one processor runs on another."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    try:
        first_core, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        features = "\n".join(line for line in first_core.splitlines() if line.startswith(FEATURE_LINES))
    except OSError:
        features = platform.processor()
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), features]
