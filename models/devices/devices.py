"""Devices by their names in a configuration, and what torch lets all of them do or none."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from layertap.models.errors import LoadError, escape, label_failures
from layertap.models.sources.grammar import parse_device


@label_failures("device")
def resolve_device(name: str) -> torch.device:
    """The device that a configuration names; ``auto`` is the first GPU if there is one. LoadError for no device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, index = parse_device(name)
    if kind == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise LoadError(f"there is no device {escape(name)} on this machine", hint="use auto or cpu")
    return torch.device("cuda", index)


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
