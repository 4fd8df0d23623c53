"""Taint tracking: which tensors were computed from marked ones, operation by operation, during a forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from layertap.models.dispatch_mode import DispatchMode
from layertap.models.hooks.tensor_tree import iterate_tensors


class Taint(DispatchMode):
    """While active, records which storages hold values that were computed from marked tensors.

    Once Python reads a number from a tainted tensor (``item()``, ``if mask.any():``), all later results are tainted.
    Reads by ``tolist()`` or ``numpy()`` are not detected.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tainted: set[int] = set()  # by address, each as long as its storage lives: addresses are reused
        self._has_read = False
        self._paused = False

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Mark these tensors, and all that share memory with them."""
        for storage in map(Tensor.untyped_storage, tensors):
            if storage._cdata not in self._tainted:
                self._tainted.add(storage._cdata)
                weakref.finalize(storage, self._tainted.discard, storage._cdata)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on one that was marked."""
        return self._has_read or self._is_any_tainted([tensor])

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore operations inside, which are not the model's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; its results are tainted if an argument is."""
        options = kwargs or {}
        result = func(*args, **options)
        if self._paused or func._schema.name in SHAPES_ONLY:
            return result
        if func._schema.name == "aten::copy_" and not self._is_any_tainted(args[1:2]) and _fills_storage(args[0]):
            self._tainted.discard(args[0].untyped_storage()._cdata)
        elif self._is_any_tainted(_find_tensors((args, options))):
            self.mark(_find_tensors((result, args, options) if func._schema.is_mutable else (result,)))
            self._has_read |= next(_find_tensors((result,)), None) is None and not func._schema.is_mutable
        return result

    def _is_any_tainted(self, tensors: Iterable[Tensor]) -> bool:
        return any(tensor.untyped_storage()._cdata in self._tainted for tensor in tensors)


def _fills_storage(tensor: Tensor) -> bool:
    """Whether writing a whole tensor overwrites all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _find_tensors(value: object) -> Iterator[Tensor]:
    return (tensor for _, tensor in iterate_tensors(value))


SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
