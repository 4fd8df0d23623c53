"""Gradients of one forward: where the graph is held on to, what is summed up, what each anchor gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from layertap.models.devices.memory import is_device_error
from layertap.models.errors import InputError
from layertap.models.hooks.tensor_tree import Path

Key = tuple[Any, str, int, Path]  # a module, a side, a call, a leaf


class Tape:
    """The anchors and the objective of one forward.

    An anchor stands where a value left a module, or came to it; what goes on is a copy, so that operations in place
    find something of their own to write to, and whoever else uses the value adds nothing to its gradient.
    """

    def __init__(self) -> None:
        self._anchors: dict[Key, Tensor] = {}
        self._totals: dict[Any, Tensor] = {}

    def anchor(self, key: Key, value: Tensor, changes: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
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

    def add(self, where: object, objective: Tensor) -> None:
        """Differentiate this too; ``where`` tells the tensor that it looks at."""
        self._totals[where] = self._totals[where] + objective if where in self._totals else objective

    def reaches(self, where: object, anchors: Collection[Key]) -> bool:
        """Whether a graph leads from what was differentiated there to the earliest call that is anchored so."""
        first = next(key for key in self._anchors if key in anchors)[:3]
        ends = {get_gradient_edge(anchor).node for key, anchor in self._anchors.items() if key[:3] == first}
        return not ends.isdisjoint(_nodes(self._totals[where]))

    def gradients(self) -> Mapping[Key, Tensor]:
        """The gradient at each anchor: zero where the objective does not depend on it. Ends the graph.

        InputError where the model computes what has no derivative.
        """
        anchors = list(self._anchors.values())
        totals = [total for total in self._totals.values() if total.requires_grad]
        if not totals:
            return {key: torch.zeros_like(anchor) for key, anchor in self._anchors.items()}
        try:
            found = torch.autograd.grad(totals, anchors, allow_unused=True)
        except RuntimeError as error:
            if is_device_error(error):
                raise
            raise InputError(
                f"the model can't be differentiated there ({type(error).__name__})",
                hint="ask for a gradient nearer to the objective",
            ) from error
        return {
            key: torch.zeros_like(anchor) if gradient is None else gradient.detach()
            for (key, anchor), gradient in zip(self._anchors.items(), found, strict=True)
        }


def _nodes(end: Tensor) -> set[Any]:
    """Every operation that a tensor hangs on."""
    found: set[Any] = set()
    work: list[Any] = [end.grad_fn]
    while work:
        node = work.pop()
        if node is not None and node not in found:
            found.add(node)
            work += [before for before, _ in node.next_functions]
    return found
