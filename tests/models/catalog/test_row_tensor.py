"""What pads a text is cut off and left out, wherever a tensor has its tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.catalog.text_lengths import TextLengths, measure_lengths
from layertap.models.errors import SelectorError
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.interventions.operations import apply_operation
from layertap.models.interventions.resolve import resolve_intervention
from layertap.models.selection.hook_points import Intervention, Objective, Operation
from layertap.models.selection.selectors import parse_selector

REAL = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
LEAVES = {
    "rows first": (TensorInfo((), (1, 5, 2), "float32", token_axes=(1,)), (2, 5, 2)),
    "tokens first": (TensorInfo((), (5, 1, 2), "float32", row_axis=1, token_axes=(0,)), (5, 2, 2)),
    "tokens last": (TensorInfo((), (1, 2, 5), "float32", token_axes=(2,)), (2, 2, 5)),
    "attention": (TensorInfo((), (1, 3, 5, 5), "float32", token_axes=(2, 3)), (2, 3, 5, 5)),
    "folded": (TensorInfo((), (5, 2), "float32", token_axes=(0,)), (10, 2)),
    "the same for all": (TensorInfo((), (1, 5, 2), "float32", row_axis=None, token_axes=(1,)), (1, 5, 2)),
}


def each(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a tensor, each with its axes of tokens first."""
    if name == "folded":
        return list(value.reshape(2, -1, 2))
    if name == "the same for all":
        return [value[0]]
    rows = value.movedim(1, 0) if name == "tokens first" else value
    return [
        row.movedim((-2, -1), (0, 1)) if name == "attention" else row.T if name == "tokens last" else row
        for row in rows
    ]


def test_cut_and_own_rows_and_changes() -> None:
    """In each layout the same numbers are kept, and only these are changed."""
    for name, (info, shape) in LEAVES.items():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        rows = RowTensor(value, info, REAL)
        cut = rows.truncate(3)
        kept = cut.value
        assert cut.info.shape_for(2 if info.row_axis is not None else 1) == tuple(kept.shape)
        apart = [row.value for row in rows.strip()]
        other = apply_operation(rows, Operation("scale", by=2.0), 0)
        assert other.shape == value.shape
        for place, row in enumerate(each(name, value)):
            length = 3 if info.row_axis is None else int(REAL[place].sum())
            mine = (slice(length),) * len(info.token_axes)
            (found,) = each(name, apart[place]) if name != "folded" else [apart[place]]
            assert torch.equal(found, row[mine])
            assert torch.equal(each(name, kept)[place][mine], row[mine])
            assert torch.equal(each(name, other)[place][mine], 2 * row[mine])
            unchanged = each(name, other)[place].clone()
            unchanged[mine] = row[mine]
            assert torch.equal(unchanged, row)
            rest = each(name, kept)[place].clone()
            rest[mine] = 0
            assert not rest.any()


def test_lengths() -> None:
    """A text has the tokens that its mask keeps, and ends with the last of them, wherever it begins."""
    text = TextSpec("ids", "mask", 8, 0, 10)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    assert measure_lengths({"ids": mask, "mask": mask}, text) == TextLengths(2, 4, 4, 4)
    assert measure_lengths({"ids": mask[:1], "mask": mask[:1]}, text) == TextLengths(2, 2, 3, 2)
    assert measure_lengths({"ids": mask}, TextSpec("ids", None, 8, 0, 10)) == TextLengths(5, 5, 5, 5)


def test_changes_within_a_text() -> None:
    """Regions and channels along an axis of tokens end with the text, however far it is padded."""
    maps = TensorInfo(("maps",), (1, 3, 8, 8), "float32", layout="NCHW", token_axes=(2, 3))
    pairs = TensorInfo(("pairs",), (1, 8, 8), "float32", layout="NTC", token_axes=(1, 2))
    call = Call(CallBoundary(0, 0.0, ()), CallBoundary(1, 1.0, (maps, pairs)))
    catalog = Catalog({"a": Layer("a", "Net", True, 0, (call,), ())}, 0.0, True)
    lengths = TextLengths(5, 5, 8, 5)
    for end, fits in ((5, True), (6, False)):
        zero = Intervention(parse_selector("a[maps]"), Operation("zero", region=(0, 0, end, 1)))
        goal = Objective("layer", selector=parse_selector("a[pairs]"), channel=end - 1)
        with nullcontext() if fits else pytest.raises(SelectorError, match="within 5 by 5"):
            resolve_intervention(zero, None, catalog, lengths)
        with nullcontext() if fits else pytest.raises(SelectorError, match="between -5 and 4"):
            resolve_objective(goal, catalog, lengths)
