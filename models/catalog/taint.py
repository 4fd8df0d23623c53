"""Taint tracking: which tensors were computed from marked ones, operation by operation, during a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Self

from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from layertap.models.devices.dispatch_mode import DispatchMode
from layertap.models.hooks.tensor_tree import iterate_tensors


class MarkedMemory:
    """Marked storages; a mark ends with its storage."""

    def __init__(self) -> None:
        self._storages: MutableMapping[UntypedStorage, bool] = WeakIdKeyDictionary()

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors and all that share memory with them."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()] = True

    def unmark(self, tensors: Iterable[Tensor]) -> None:
        """Remove the marks of tensors and all that share memory with them."""
        for tensor in tensors:
            self._storages.pop(tensor.untyped_storage(), None)

    def has_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of the tensors is in marked memory."""
        return any(tensor.untyped_storage() in self._storages for tensor in tensors)

    def note(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any], result: object) -> bool:
        """Mark what an operation computed from marked tensors; whether it took any."""
        if func._schema.name in SHAPES_ONLY:
            return False
        if func._schema.name == "aten::copy_" and not self.has_any(args[1:2]) and _fills_storage(args[0]):
            self.unmark(args[:1])
            return False
        if not self.has_any(find_tensors((args, options))):
            return False
        self.mark(find_tensors((result, args, options) if func._schema.is_mutable else (result,)))
        return True


class Taint(DispatchMode):
    """While active, marks what is computed from marked tensors.

    ``has_read``: Python has read a number of one (``item()``, ``if mask.any():``); all that follows depends on it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_read = False
        self.marked = MarkedMemory()

    def __enter__(self) -> Self:
        self._reads = _Reads(self)
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]
        del self._reads  # each refers to the other

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on a marked one."""
        return self.has_read or self.marked.has_any([tensor])

    def note_read(self, args: object) -> None:
        """Note that Python reads numbers."""
        self.has_read |= self.marked.has_any(find_tensors(args))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; its results are tainted if an argument is."""
        options = kwargs or {}
        result = func(*args, **options)
        is_tainted = self.marked.note(func, args, options, result)
        if is_tainted and next(find_tensors((result,)), None) is None and not func._schema.is_mutable:
            self.note_read(args)
        return self.follow(func, args, options, result, is_tainted)

    def follow(
        self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any], result: Any, is_tainted: bool
    ) -> Any:
        """The result with which the forward continues."""
        return result


class _Reads(TorchFunctionMode):
    """Notes reads that no dispatch mode sees."""

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._taint.note_read(args)
        return func(*args, **(kwargs or {}))


def find_tensors(value: object) -> Iterator[Tensor]:
    """The dense tensors in a value."""
    return (tensor for _, tensor in iterate_tensors(value))


def _fills_storage(tensor: Tensor) -> bool:
    """Whether writing a whole tensor overwrites all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
