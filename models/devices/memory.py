"""Device memory: how much is free, how much a forward takes, and which errors mean out of memory."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from layertap.models.devices.devices import is_accelerator, measure_free_bytes
from layertap.models.devices.dispatch_mode import DispatchMode

Inputs = Mapping[str, Tensor]  # a batch, by the names of a model's inputs
Forward = Callable[[Inputs], object]
OUT_OF_MEMORY_MESSAGES = (
    *("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("OUT_OF_DEVICE_MEMORY", "OUT_OF_HOST_MEMORY"),  # of Intel's driver
    "error: out of memory",  # from the driver of another kind, as a plain RuntimeError
)
CGROUPS: Mapping[str, Path] = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}  # versions 2, 1
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
PRIVATE_PAGES = frozenset({"Private_Clean", "Private_Dirty"})
# oneDNN gives no reason: if the process has a memory limit, these mean out of memory.
LIMITED_MESSAGES = ("could not create a primitive", "could not create a memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, this machine or this process is out of memory."""
    limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    messages = OUT_OF_MEMORY_MESSAGES + (LIMITED_MESSAGES if limited else ())
    is_named = isinstance(error, RuntimeError) and any(words in str(error) for words in messages)
    return isinstance(error, torch.OutOfMemoryError) or is_named or (limited and isinstance(error, MemoryError))


def is_device_error(error: BaseException) -> bool:
    """Whether an error is the device's fault, not the model's."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def measure_peak_bytes(forward: Forward, rows: Inputs, module: nn.Module) -> int:
    """The peak memory of a forward's inputs and activations, without weights or what kernels take for a while.

    Tensors are counted, not the device's memory: other threads may use that at the same time.
    """
    batch = {name: value.clone() for name, value in rows.items()}
    watch = _PeakMemory([*module.parameters(), *module.buffers(), *batch.values()])
    with watch:
        forward(batch)
    return watch.peak + sum(value.nbytes for value in batch.values())


class _PeakMemory(DispatchMode):
    """Adds up the storages that operations allocate, while they are alive."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known = [tensor.untyped_storage() for tensor in known if _has_storage(tensor)]
        self._alive = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its new storages, not views of existing ones, such as a model's table."""
        options = kwargs or {}
        given = {storage._cdata for storage in _list_storages((*args, *options.values()))}
        made = func(*args, **options)
        for storage in _list_storages(made if isinstance(made, tuple) else (made,)):
            if storage._cdata not in given:
                self._see(storage)
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


def _list_storages(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """The storages of an operation's arguments or results, which are tensors and lists of tensors."""
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if _has_storage(each):
                yield each.untyped_storage()


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor; a sparse one's parts are counted when they are created."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def count_module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, on any device; shared memory counts once."""
    storages = {}
    for value in (*module.parameters(), *module.buffers()):
        if _has_storage(value):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def measure_private_bytes(pid: int | Literal["self"] = "self") -> int:
    """A process's private memory, not shared with others, in bytes; 0 if the system does not tell."""
    lines = (line.partition(":") for line in _read_lines(Path(f"/proc/{pid}/smaps_rollup")))
    return sum(int(rest.split()[0]) * 1024 for name, _, rest in lines if name in PRIVATE_PAGES)


def measure_available_bytes(device: torch.device) -> int:
    """Bytes that are free now: on an accelerator, or on this machine within the limit of this process's cgroup."""
    if is_accelerator(device):
        return measure_free_bytes(device)
    machine = _find_number(Path("/proc/meminfo"), "MemAvailable:", -1) * 1024
    return min(filter(lambda free: free >= 0, (machine, *_read_cgroup())), default=2**32)


def _read_cgroup() -> Iterator[int]:
    """What the limit of each cgroup around this process leaves."""
    for folder, (limit_name, used_name, spare_name) in product(_list_cgroups(), CGROUP_FILES):
        limit, used = ("".join(_read_lines(folder / name)[:1]) for name in (limit_name, used_name))
        if limit.isdigit() and used.isdigit():
            # Cached files count as used, but the kernel drops them when memory is needed.
            yield max(int(limit) - int(used) + _find_number(folder / "memory.stat", spare_name, 0), 0)


def count_oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory: in this process's cgroup, or else on this machine."""
    files = [folder / name for folder in _list_cgroups() for name in ("memory.events", "memory.oom_control")]
    counts = (_find_number(path, "oom_kill", -1) for path in (*files, Path("/proc/vmstat")))
    return next((count for count in counts if count >= 0), 0)


def _list_cgroups() -> list[Path]:
    """The folders of this process's cgroup and of those around it, if they limit memory; in a container only the last.

    Some do not exist: the path may be another outside of a container, and version 2 of cgroups may have no memory.
    """
    folders = list[Path]()
    for line in _read_lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUPS:
            own = Path(path.lstrip("/"))
            folders += (CGROUPS[controllers] / each for each in (own, *own.parents))
    return folders


def _find_number(path: Path, name: str, default: int) -> int:
    """A number in a file of lines with a name and a number."""
    lines = (line.split() for line in _read_lines(path))
    return next((int(words[1]) for words in lines if words[:1] == [name]), default)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # another system, or a sandbox
        return []
