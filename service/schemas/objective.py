"""The objective as a body describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from layertap.models.catalog.row_tensor import POSITION_AXES
from layertap.models.selection.hook_points import Objective, ObjectiveKind
from layertap.models.selection.selectors import MAX_TEXT, parse_selector
from layertap.service.schemas.base import Number, OneError, SignedIndex, StrictBody, StrictIndex, make_list

AxisIndex = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
AxisIndices = Annotated[tuple[AxisIndex, ...], Field(min_length=1, max_length=max(POSITION_AXES))]
Position = Annotated[
    AxisIndices | None,
    BeforeValidator(make_list, json_schema_input_type=AxisIndex | AxisIndices | None),
    OneError("Input should be a whole number, or a list of two"),
]
SomeClass = StrictIndex | Literal["top"]
Class = Annotated[
    SomeClass | None,
    OneError("Input should be the number of a class, or 'top'"),
]
Target = Annotated[tuple[Number, ...], Field(min_length=1, max_length=1_000_000)] | None


class ObjectiveBody(StrictBody):
    """What gradients are of."""

    kind: ObjectiveKind = "logit"
    klass: Class = Field(None, alias="class")
    target: Target = None
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    channel: SignedIndex | None = None
    position: Position = None

    def to_objective(self) -> Objective:
        """What it means; SelectorError where its layer is no selector."""
        return Objective(
            self.kind,
            self.klass,
            self.target,
            parse_selector(self.layer) if self.layer is not None else None,
            self.channel,
            self.position,
        )
