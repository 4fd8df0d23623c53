"""A plan's captures as one graph: the forward is exported with hooks on, and what comes after the last is cut off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from layertap.models.capture.reduction import ReducedTensor, apply_reduction
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.hooks.attach import ATTACH
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import call_module
from layertap.models.selection.hook_points import group_by_call
from layertap.models.selection.plan import Capture

MIN_ROWS = 2  # rows of a graph that takes any number: sizes 0 and 1 are graphs of their own


def export_graph(model: LoadedModel, captures: Sequence[Capture], rows: Mapping[str, Tensor]) -> ExportedProgram:
    """The graph from a batch to its reduced captures; for any number of rows, or for one where one is given.

    Raises whatever the export does: a model may decide by values, or do what can't be exported.
    """
    batch = tuple(rows[spec.name] for spec in model.inputs)
    several = len(batch[0]) >= MIN_ROWS
    dynamic = tuple({0: Dim("rows", min=MIN_ROWS)} for _ in batch) if several else None
    with torch.no_grad():
        program = export(
            _CapturingModule(model, captures).eval(),
            batch,
            dynamic_shapes=(dynamic,) if dynamic else None,
            strict=False,
        )
        # Without writes in place it is plain what nobody needs, and that goes.
        pruned: ExportedProgram = program.run_decompositions({})
        return pruned


class _CapturingModule(nn.Module):
    """A model that gives its captures in place of its output."""

    def __init__(self, model: LoadedModel, captures: Sequence[Capture]) -> None:
        super().__init__()
        self.model = model.module
        self._names = [spec.name for spec in model.inputs]
        self._captures = captures

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """All captures of a batch, reduced; scales behind their values."""
        reduced: dict[Capture, ReducedTensor] = {}
        modules = {name or ".": part for name, part in self.model.named_modules(remove_duplicate=False)}
        captures = ((capture.point, capture) for capture in self._captures)
        with ExitStack() as stack:
            for (module, side), calls in group_by_call(captures, modules).items():
                ATTACH[side](stack, module, partial(_reduce_captures, calls, reduced))
            # To its end: an export that is left midway is none. What nobody captures is cut off from the graph.
            call_module(dict(zip(self._names, inputs, strict=True)), self.model)
        return list(flatten(reduced[capture] for capture in self._captures))


def _reduce_captures(
    calls: Mapping[int, Sequence[Capture]], reduced: dict[Capture, ReducedTensor], call: int, value: object
) -> None:
    tensors = dict(iterate_tensors(value)) if call in calls else {}
    for capture in calls.get(call, ()):
        # A copy: what the forward writes there later is another value.
        copy = RowTensor(tensors[capture.point.path].clone(), capture.info)
        reduced[capture] = apply_reduction(copy, capture.reduction)


def flatten(reduced: Iterable[ReducedTensor]) -> Iterator[Tensor]:
    """The tensors of reduced captures, one after the other."""
    for each in reduced:
        yield each.values
        if each.scale is not None:
            yield each.scale
