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
# What only CUDA devices do here, by the setting that asks for it: what it needs besides.
CUDA_ONLY = {
    "tf32": "compute capability 8.0",
    "decode: device": "torchvision with nvJPEG",
    "cuda_graphs": "a graph that is compiled for the device",
    "compile": "Triton and a C++ compiler",
}
WITHOUT_FLOAT64 = "mps"  # which some poolings and checks need
UNKNOWN_BYTES = 2**62  # free memory of a device that does not report it: only settings limit its forwards


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is an accelerator: tensors are copied to it, and work on it must be waited for."""
    return device.type != "cpu"


def find_lack(device: torch.device, setting: str) -> str:
    """Why a device does not do what a setting of ``CUDA_ONLY`` asks for; empty if it may."""
    if device.type == "cuda":
        return ""
    return f"{setting} needs CUDA, and {CUDA_ONLY[setting]}" if is_accelerator(device) else "there is no GPU"


def list_accelerators() -> list[torch.device]:
    """The accelerators of this machine: GPUs, or another kind that torch or a plugin of it knows; all of one kind."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())] if kind else []


@label_failures("device")
def resolve_device(name: str) -> torch.device:
    """The device that a configuration names; LoadError if it does not exist.

    ``auto`` is the accelerator with the most free memory, or the CPU if there is none with float64.
    """
    kind, index = parse_device(name)
    if kind == "cpu":
        return torch.device("cpu")
    found = {str(each): each for each in list_accelerators() if kind != "auto" or each.type != WITHOUT_FLOAT64}
    if kind == "auto":
        if len(found) > 1:
            return max(found.values(), key=measure_free_bytes)  # a device that is asked takes some of its memory
        return next(iter(found.values()), torch.device("cpu"))
    full_name = f"{kind}:{index}"
    if full_name not in found:
        known = ", ".join(("auto", "cpu", *found))
        raise LoadError(f"there is no device {escape(name)} on this machine", hint=f"use one of {known}")
    return found[full_name]


@label_failures("device")
def list_devices(names: Sequence[str]) -> tuple[str, ...]:
    """The full names of several devices, ``cuda:0``; ``all`` is every accelerator. LoadError if one does not exist."""
    listed = tuple(f"{kind}:{index}" for kind, index in parse_devices(names)) or tuple(map(str, list_accelerators()))
    if not listed:
        raise LoadError("there is no GPU on this machine", hint="use device: auto or cpu")
    for name in listed:
        resolve_device(name)
    return listed


def measure_free_bytes(accelerator: torch.device) -> int:
    """Bytes that are free on an accelerator now; ``UNKNOWN_BYTES`` if it does not report them."""
    try:
        return torch.accelerator.get_memory_info(accelerator)[0]
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # its allocator has no such figure
        return UNKNOWN_BYTES


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device this thread's current one until the block ends: compiled graphs use its current stream."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()


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
