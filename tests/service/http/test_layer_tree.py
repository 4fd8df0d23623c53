"""Layers as text: a line each, in columns, indented as they lie in one another."""

from __future__ import annotations

from typing import Any

from layertap.models.catalog.catalog import Call, CallBoundary, Layer, TensorInfo
from layertap.service.http.layer_tree import format_tree
from layertap.service.http.model_descriptions import describe_layer


def layer(
    name: str, kind: str, *shapes: tuple[int, ...], parameters: int = 0, calls: int = 1, cost: float = 0.5
) -> dict[str, Any]:
    """A layer that returns tensors of these shapes, as the server describes it."""
    leaves = tuple(TensorInfo((), shape, "float32", layout="NCHW" if len(shape) == 4 else None) for shape in shapes)
    side = CallBoundary(0, cost, leaves)
    return describe_layer(Layer(name, kind, not shapes, parameters, (Call(side, side),) * calls, ()))


NET = (
    layer(".", "Net", (1, 10), parameters=1_234_567, cost=1.0),
    layer("stem", "Conv2d", (1, 3, 8, 8), parameters=24, cost=0.125),
    layer("blocks.0", "Block", (1, 4, 8, 8), cost=0.4),
    layer("blocks.0.relu", "ReLU", (1, 4, 8, 8), calls=2, cost=0.3),
    layer("blocks.1", "Block", (1, 4, 8, 8), (1, 5), (1, 6), cost=0.75),
    layer("head", "Linear", (1, 10), cost=1.0),
    layer("blocks", "ModuleList", calls=0),
)
TEXT = """\
layer              type        output           parameters  cost
.                  Net         1×10              1,234,567  100%
  stem             Conv2d      1×3×8×8 NCHW             24   12%
  blocks.0         Block       1×4×8×8 NCHW              0   40%
    blocks.0.relu  ReLU        1×4×8×8 NCHW              0   30%  2 calls
  blocks.1         Block       1×4×8×8 NCHW +2           0   75%
  head             Linear      1×10                      0  100%
  blocks           ModuleList  never runs                0
"""


def test_tree() -> None:
    """A layer stands beneath those that it is a part of, what never runs at the end."""
    assert format_tree(NET) == TEXT


def test_names_that_paint() -> None:
    """A name that would move the cursor of a terminal is escaped; one very deep harms nobody."""
    text = format_tree([layer("a\x1b[31m", "B\r\n", (1,)), layer("\u202ex", "X", (1,))])
    assert text.replace("\n", "").isprintable()
    deep = [layer(".".join("a" * depth), "Deep", (1,)) for depth in range(1, 1101)]
    assert format_tree(deep).count("\n") == 1101
