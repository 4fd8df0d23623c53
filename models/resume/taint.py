"""What is computed from some tensors, followed from operation to operation while a forward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layertap.models.hooks.tensor_tree import iterate_tensors


class Taint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: which memory holds what was computed from tensors that were marked.

    From a number that Python took out of one (``item()``, ``if mask.any():``) everything later follows. What it takes
    by ``tolist()`` or ``numpy()`` is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[int] = set()
        self._read = False
        self._looking = False

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """From here on these tensors count, and all that shares memory with them."""
        self._memory |= _memory(tensors)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor hangs on one that was marked."""
        return self._read or not self._memory.isdisjoint(_memory([tensor]))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operations that are none of the model's."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; its results follow from its arguments."""
        given = kwargs or {}
        result = func(*args, **given)
        if self._looking or func._schema.name in SHAPES_ONLY:
            return result
        taken, made = _memory(_tensors((args, given))), _memory(_tensors((result,)))
        if self._memory.isdisjoint(taken):
            self._memory -= made  # memory that was let go is used again
        else:
            self._memory |= made | (taken if func._schema.is_mutable else set())
            self._read |= not made and not func._schema.is_mutable
        return result


def _tensors(value: object) -> Iterator[Tensor]:
    return (tensor for _, tensor in iterate_tensors(value))


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
