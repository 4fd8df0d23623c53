"""Tensors as plain memory, copied to a device and from it; on accelerators in the calling thread's current stream.

Code that only accelerators need is in this module: the CPU has nothing to wait for or to release. Copies from and to
pinned memory run while threads go on. torch caches pinned memory and reuses it once no copy uses it, but never returns
it to the system. Therefore each piece is limited to ``MAX_PINNED_BYTES``; how many pieces there are at a time depends
on how many requests have results that wait to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from layertap.models.devices.devices import is_accelerator, list_accelerators
from layertap.models.devices.memory import is_out_of_memory
from layertap.models.errors import LayertapError, list_causes

ALIGNMENT = 16  # bytes; enough for every dtype
MAX_PINNED_BYTES = 2**26  # of one batch, or of one batch's results; larger ones use pageable memory


def use_own_stream(device: torch.device) -> None:
    """Give this thread its own stream on an accelerator, so that it does not wait for other threads' work."""
    if is_accelerator(device):
        torch.accelerator.set_stream(torch.Stream(device))


def synchronize(device: torch.device) -> None:
    """Wait until the work of all threads on a device is done; raises the device's errors."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until this thread's work on a device is done; raises the device's errors."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).record_event().synchronize()  # not all kinds wait for a stream


def is_lost(error: BaseException) -> bool:
    """Whether a device of which this process has memory gives nothing but errors, asked after any error.

    Not if the error says that memory is short, or is no other code's.
    """
    causes = list_causes(error)
    if any(map(is_out_of_memory, causes)) or all(isinstance(each, LayertapError) for each in causes):
        return False
    try:
        for device in filter(_has_memory, list_accelerators()):
            synchronize(device)
    except RuntimeError as found:
        return not is_out_of_memory(found)
    return False


def _has_memory(device: torch.device) -> bool:
    """Whether this process has memory of a device: to ask another one for anything would take some of it."""
    try:
        return torch.accelerator.memory_reserved(device) > 0
    except RuntimeError:  # its allocator has no such figure
        return True


def release_memory() -> None:
    """Release torch's cached memory of accelerators; none is initialised for it."""
    if torch.accelerator.current_accelerator() is not None:
        with suppress(RuntimeError):  # a device that is lost, or whose allocator releases nothing
            torch.accelerator.empty_cache()


def to_device(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate rows into a batch on a device, always a copy, which may still be running when this returns.

    Rows may be on the device already, if the thread that made them has synchronised.
    """
    if not is_accelerator(device):
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        # Contiguous: kernels round differently in other memory formats, and one row would set the batch's format.
        return whole.to(device, dtype, copy=len(parts) == 1, memory_format=torch.contiguous_format)
    if any(is_accelerator(part.device) for part in parts):
        return torch.cat([_move_part(part, dtype, device) for part in parts]).contiguous()
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    batch = torch.empty(shape, dtype=dtype, pin_memory=prod(shape) * dtype.itemsize <= MAX_PINNED_BYTES)
    at = 0
    for part in parts:
        batch[at : at + len(part)].copy_(part)
        at += len(part)
    return batch.to(device, non_blocking=True)


def _move_part(part: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not is_accelerator(part.device):
        return to_device([part], dtype, device)
    part.record_stream(torch.accelerator.current_stream(device))  # else its own thread could reuse the memory too early
    return part.to(device, dtype)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; if any is on an accelerator the result is too, and complete when this returns."""
    device = next((part.device for part in parts if is_accelerator(part.device)), None)
    if device is None:
        return torch.cat(list(parts))
    joined = torch.cat([part.to(device) for part in parts])
    synchronize_stream(device)
    return joined


def to_host(data: Tensor) -> Tensor:
    """Copy a tensor from an accelerator to the host; complete when this returns."""
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.nbytes <= MAX_PINNED_BYTES)
    host.copy_(data, non_blocking=True)
    synchronize_stream(data.device)
    return host


def copy_packed(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the host in a single copy; tensors on the host are returned as they are."""
    if not tensors or not is_accelerator(tensors[0].device):
        return tensors
    return unpack(to_host(pack(tensors)), tensors)


def pack(tensors: list[Tensor]) -> Tensor:
    """The bytes of all tensors in one tensor, each starting at a multiple of ``ALIGNMENT``."""
    parts = []
    for tensor in tensors:
        flat = view_bytes(tensor)
        parts += [flat, flat.new_empty(-len(flat) % ALIGNMENT)]
    return torch.cat(parts)


def unpack(data: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The inverse of ``pack``: views of its bytes with the shapes and dtypes of ``like``."""
    tensors, start = [], 0
    for tensor in like:
        tensors.append(data[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return tensors


def is_of_export(value: torch.Tensor) -> bool:
    """Whether torch exports a forward with it: it stands for a dense tensor, and has no numbers."""
    return type(value).__module__.startswith("torch._subclasses.")


def to_plain(value: torch.Tensor) -> torch.Tensor:
    """The same numbers as a plain tensor: detached, of class ``Tensor``, without lazy conjugation or negation."""
    plain = value.detach()
    return (plain if is_of_export(plain) else plain.as_subclass(torch.Tensor)).resolve_conj().resolve_neg()


def view_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor's values in their order, (bytes,), uint8, on its device; a view where possible."""
    plain = to_plain(value).contiguous()
    # With a single entry any strides count as contiguous, and a stride of 0 can't be viewed as another dtype.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
