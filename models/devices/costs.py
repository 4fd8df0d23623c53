"""What forwards of a model take in time and memory, measured when it is loaded, not guessed."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layertap.models.catalog.catalog import Costs

Rows = Mapping[str, Tensor]
Forward = Callable[[Rows], object]
SEVERAL = 4  # rows of the larger forward
FEWEST, MOST, ENOUGH_S = 2, 8, 0.5  # rounds of forwards
SINGLE = 5  # rounds of one row: whether all cores are worth it hangs on a small difference
PATIENCE_S = 3.0  # a larger forward that is expected to take longer is not run
NO_MEMORY = (
    *("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "CUDA error: out of memory",  # of the driver, where torch's allocator was not asked
)
LEAST_S = 0.005  # a quicker forward has too little to share out
WORTH = 1.15  # all threads must be that much quicker than one, or one does


def measure_costs(
    forward: Forward, row: Rows, module: nn.Module, device: torch.device, rowwise: bool, most: int
) -> Costs:
    """What a forward of so many rows takes; ``row`` is a batch of one, which stays as it is.

    Runs some forwards, without a graph, in the thread that owns the module: of one row, of several, and on a CPU of
    one with so many threads as there may be at ``most``, in turn. Of each the quickest counts: whatever disturbs a
    machine only adds.
    """
    with torch.no_grad(), use_threads(1):
        memory = measure_peak_bytes(forward, row, module, device)
        one = _seconds(forward, row, device)
        kinds = {"one": (row, 1)}
        if rowwise and one * SEVERAL <= PATIENCE_S:
            kinds["several"] = ({name: value.expand(SEVERAL, *value.shape[1:]) for name, value in row.items()}, 1)
        if device.type == "cpu" and most > 1 and LEAST_S <= one <= PATIENCE_S:
            kinds["all_cores"] = (row, most)
        best = _quickest(forward, kinds, device) if one <= PATIENCE_S else {"one": one}
    one, several = best["one"], best.get("several", best["one"] * SEVERAL)
    per_row = min(max((several - one) / (SEVERAL - 1), one / (2 * SEVERAL)), one)
    speedup = one / best.get("all_cores", one)
    return Costs(one - per_row, per_row, memory, speedup if speedup >= WORTH else 1.0)


def _quickest(forward: Forward, kinds: Mapping[str, tuple[Rows, int]], device: torch.device) -> dict[str, float]:
    """The least seconds of each kind of forward: rows and threads."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    fewest = {"several": FEWEST, "one": SINGLE if "all_cores" in kinds else FEWEST, "all_cores": SINGLE}
    begun = time.perf_counter()
    for number in range(MOST):
        early = time.perf_counter() - begun < ENOUGH_S
        for name, (rows, count) in kinds.items():
            if early or number < fewest[name]:
                with use_threads(count):
                    found[name].append(_seconds(forward, rows, device))
    return {name: min(seconds) for name, seconds in found.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or this machine has too little memory."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, torch.OutOfMemoryError) or told


def is_device_error(error: BaseException) -> bool:
    """Whether an error says something of the device, and nothing of the model that ran there."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def count_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let operations of this thread use so many threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def _seconds(forward: Forward, rows: Rows, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    begun = _now(device)
    forward(batch)
    return max(_now(device) - begun, 1e-6)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_peak_bytes(forward: Forward, rows: Rows, module: nn.Module, device: torch.device) -> int:
    """The most memory that a forward's inputs and intermediate values take at one time, weights not counted."""
    batch = {name: value.clone() for name, value in rows.items()}
    own = sum(value.nbytes for value in batch.values())
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        forward(batch)
        return max(torch.cuda.max_memory_allocated(device) - before, 0) + own
    watch = _Peak([*module.parameters(), *module.buffers(), *batch.values()])
    with watch:
        forward(batch)
    return watch.peak + own


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, as long as each lives."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known = [tensor.untyped_storage() for tensor in known if _has_storage(tensor)]
        self._alive = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at what it made: views of what was there before, a model's table, are not made."""
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if _has_storage(value)}
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if _has_storage(value) and value.untyped_storage()._cdata not in given:
                self._see(value.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor in plain memory; the parts of a sparse one are seen when they are made."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def measure_available_bytes(device: torch.device) -> int:
    """Memory that is free now, on a GPU or, within what this process's group may have, on this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [*_machine(), *_group()]
    return min(free, default=2**32)


def _machine() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _group() -> Iterator[int]:
    group = Path("/sys/fs/cgroup")
    limit, used = (next(iter(_lines(group / f"memory.{name}")), "max") for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # Files that were read lately count as used, but make room where it is wanted.
        files = (line.split() for line in _lines(group / "memory.stat"))
        spare = next((int(size) for name, size in files if name == "inactive_file"), 0)
        yield max(int(limit) - int(used) + spare, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # another system, or a sandbox
        return []
