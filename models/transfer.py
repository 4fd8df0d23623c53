"""Batches to a GPU and results from it, in the order of the stream of the thread that asks; for no other device.

Pinned memory is read and written by the GPU itself, while threads go on. torch keeps what was pinned once and hands it
out again, but not as long as a copy from or to it is under way; to the system it never goes back. Hence ``MOST_BYTES``
for each piece; how many there are at a time hangs on the requests whose results wait to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

MOST_BYTES = 2**26  # of one batch, or of one batch's results; what is larger goes through other memory


def own_stream(device: torch.device) -> None:
    """Let all that this thread does on a GPU follow each other, and wait for no other thread."""
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def settle(device: torch.device) -> None:
    """Let other threads, with streams of their own, use what this one has made, and the memory that it let go."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def wait(device: torch.device) -> None:
    """Until all that this thread has begun on a GPU is done; raises what went wrong there."""
    torch.cuda.current_stream(device).synchronize()


def to_device(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of the host as one batch on a GPU, in memory of its own; the copy may be under way when this returns."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    batch = torch.empty(shape, dtype=dtype, pin_memory=prod(shape) * dtype.itemsize <= MOST_BYTES)
    at = 0
    for part in parts:
        batch[at : at + len(part)].copy_(part)
        at += len(part)
    return batch.to(device, non_blocking=True)


def to_host(data: Tensor) -> Tensor:
    """A tensor of a GPU as one of the host, there when this returns."""
    found = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.nbytes <= MOST_BYTES)
    found.copy_(data, non_blocking=True)
    wait(data.device)
    return found
