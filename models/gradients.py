"""Gradients of one forward: where the graph is held on to, what is summed up, what each anchor gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.structure import Path

Key = tuple[Any, str, int, Path]  # a module, a side, a call, a leaf


class Tape:
    """The anchors and the objective of one forward.

    An anchor stands where a value left a module, or came to it; what goes on is a copy, so that operations in place
    find something of their own to write to, and whoever else uses the value adds nothing to its gradient.
    """

    def __init__(self) -> None:
        self._anchors: dict[Key, Tensor] = {}
        self._total: Tensor | None = None

    def anchored(self, key: Key, value: Tensor, changes: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Hold on to a value; what is returned goes on in its place.

        ``changes`` are made to its gradient, the last one first.
        """
        # Where nothing before it is differentiated the graph begins here: weights are frozen, inputs may be integers.
        anchor = value.clone() if value.requires_grad else value.detach().clone().requires_grad_()
        self._anchors[key] = anchor
        handed = anchor.clone()
        for change in changes:
            # Not on the anchor: whether autograd looks at a tensor before or after its own hooks is its affair.
            handed.register_hook(change)  # type: ignore[no-untyped-call]
            handed = handed.clone()
        return handed

    def add(self, objective: Tensor) -> None:
        """Differentiate this too."""
        self._total = objective if self._total is None else self._total + objective

    def gradients(self) -> Mapping[Key, Tensor]:
        """The gradient at each anchor: zero where the objective does not depend on it. Ends the graph."""
        anchors = list(self._anchors.values())
        if self._total is None or not self._total.requires_grad:
            return {key: torch.zeros_like(anchor) for key, anchor in self._anchors.items()}
        found = torch.autograd.grad(self._total, anchors, allow_unused=True)
        return {
            key: torch.zeros_like(anchor) if gradient is None else gradient.detach()
            for (key, anchor), gradient in zip(self._anchors.items(), found, strict=True)
        }
