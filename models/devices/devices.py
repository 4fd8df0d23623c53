"""Devices by their names in a configuration, and what torch lets all of them do or none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import parse_device, parse_devices


@label_failures("device")
def resolve_device(name: str) -> torch.device:
    """The device that a configuration names; LoadError for no device.

    ``auto`` is the GPU that has most memory free, the CPU where there is none.
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
    """Several devices by the names that each has alone; of ``all`` every GPU. LoadError where one is not there."""
    devices = parse_devices(names) or tuple(("cuda", index) for index in range(torch.cuda.device_count()))
    if not devices:
        raise LoadError("there is no GPU on this machine", hint="use device: auto or cpu")
    listed = tuple(f"{kind}:{index}" for kind, index in devices)
    for name in listed:
        resolve_device(name)
    return listed


def _choose_device() -> torch.device:
    """The GPU that has most memory free, whoever uses the rest."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:  # looking at one takes some of its memory
        return torch.device("cuda", max(range(count), key=lambda index: torch.cuda.mem_get_info(index)[0]))
    return torch.device("cuda", 0) if count else torch.device("cpu")


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Let a device be this thread's own until the block ends: compiled graphs ask for the stream of that one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def allow_tf32(allowed: bool) -> None:
    """Let products and convolutions of float32 on GPUs keep 10 bits of mantissa, or all: for the whole process.

    By itself torch would let convolutions: not what an offline forward in float32 gives.
    """
    # These set the younger ``fp32_precision`` too; setting that would make reading these, as compilers do, an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some versions say that there is a younger one
        torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cuda.matmul.allow_tf32 = allowed
