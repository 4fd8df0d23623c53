"""What is computed from some tensors, followed from operation to operation while a forward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from layertap.models.dispatch_mode import DispatchMode
from layertap.models.hooks.tensor_tree import iterate_tensors


class Taint(DispatchMode):
    """While it is entered: which memory holds what was computed from tensors that were marked.

    From a number that Python took out of one (``item()``, ``if mask.any():``) everything later follows. What it takes
    by ``tolist()`` or ``numpy()`` is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[int] = set()
        self._has_read = False
        self._paused = False

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """From here on these tensors count, and all that shares memory with them."""
        self._memory |= _find_memory(tensors)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on one that was marked."""
        return self._has_read or not self._memory.isdisjoint(_find_memory([tensor]))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operations that are none of the model's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; its results follow from its arguments."""
        options = kwargs or {}
        result = func(*args, **options)
        if self._paused or func._schema.name in SHAPES_ONLY:
            return result
        read, written = _find_memory(_find_tensors((args, options))), _find_memory(_find_tensors((result,)))
        if self._memory.isdisjoint(read):
            self._memory -= written  # memory that was freed is used again
        else:
            self._memory |= written | (read if func._schema.is_mutable else set())
            self._has_read |= not written and not func._schema.is_mutable
        return result


def _find_tensors(value: object) -> Iterator[Tensor]:
    return (tensor for _, tensor in iterate_tensors(value))


def _find_memory(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
