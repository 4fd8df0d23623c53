"""Batches to a device and results from it, on a GPU in the order of the stream of the thread that asks.

Code that only a GPU needs is in this module: other devices have nothing to wait for or to release. The GPU itself
reads and writes pinned memory, while threads go on. torch keeps what was pinned once and hands it out again, but not
while a copy from or to it is under way; it never goes back to the system. Hence ``MAX_PINNED_BYTES`` for each piece;
how many there are at a time depends on the requests whose results wait to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from layertap.models.hooks.tensor_tree import view_bytes

ALIGNMENT = 16  # bytes: any dtype may begin at a multiple of it
MAX_PINNED_BYTES = 2**26  # of one batch, or of one batch's results; what is larger goes through other memory


def create_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream: its operations run in order, and do not wait for other streams."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def use_own_stream(device: torch.device) -> None:
    """Give this thread its own stream on a GPU, so that it does not wait for other threads."""
    if device.type == "cuda":
        torch.cuda.set_stream(create_stream(device))


def synchronize(device: torch.device) -> None:
    """Wait until the work of all threads on a device is done; raises the device's errors."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until this thread's work on a device is done; raises the device's errors."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def release_memory(device: torch.device) -> None:
    """Release torch's cached memory of a device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_device(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stack rows into a batch on a device, in memory of its own; the copy may still run when this returns.

    Rows may be on the device already: whichever thread made them has waited for them.
    """
    if device.type != "cuda":
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        # Contiguous: in another memory format kernels round otherwise, and a neighbour would choose it for the batch.
        return whole.to(device, dtype, copy=len(parts) == 1, memory_format=torch.contiguous_format)
    if any(part.device.type == "cuda" for part in parts):
        return torch.cat([_move_part(part, dtype, device) for part in parts]).contiguous()
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    batch = torch.empty(shape, dtype=dtype, pin_memory=prod(shape) * dtype.itemsize <= MAX_PINNED_BYTES)
    at = 0
    for part in parts:
        batch[at : at + len(part)].copy_(part)
        at += len(part)
    return batch.to(device, non_blocking=True)


def _move_part(part: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if part.device.type != "cuda":
        return to_device([part], dtype, device)
    part.record_stream(torch.cuda.current_stream(device))  # or its memory could go to its own thread's next rows
    return part.to(device, dtype)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows one after the other; where any is on a GPU all are, and there when this returns."""
    device = next((part.device for part in parts if part.device.type == "cuda"), None)
    if device is None:
        return torch.cat(list(parts))
    joined = torch.cat([part.to(device) for part in parts])
    synchronize_stream(device)
    return joined


def to_host(data: Tensor) -> Tensor:
    """A tensor of a GPU as one of the host, there when this returns."""
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.nbytes <= MAX_PINNED_BYTES)
    host.copy_(data, non_blocking=True)
    synchronize_stream(data.device)
    return host


def copy_packed(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of one device as tensors of the host: one copy for all of them, none where they are there already."""
    if not tensors or tensors[0].device.type == "cpu":
        return tensors
    return unpack(to_host(pack(tensors)), tensors)


def pack(tensors: list[Tensor]) -> Tensor:
    """The bytes of all tensors in one, each begun at a multiple of ``ALIGNMENT``."""
    parts = []
    for tensor in tensors:
        flat = view_bytes(tensor)
        parts += [flat, flat.new_empty(-len(flat) % ALIGNMENT)]
    return torch.cat(parts)


def unpack(data: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The inverse of ``pack``: views of its bytes in the shapes and dtypes of the tensors given."""
    tensors, start = [], 0
    for tensor in like:
        tensors.append(data[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return tensors
