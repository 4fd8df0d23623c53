"""The objective as a body describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from layertap.models.gradients.objectives import ObjectiveKind
from layertap.models.gradients.position import AXES
from layertap.models.selection.hook_points import Objective
from layertap.models.selection.selectors import MAX_TEXT, parse_selector
from layertap.service.schemas.base import Number, SignedIndex, StrictBody


def _parse_position(value: object) -> tuple[int, ...] | None:
    numbers = value if isinstance(value, list) else [value]
    if value is None:
        return None
    if len(numbers) in AXES and all(type(number) is int and -(2**31) <= number < 2**31 for number in numbers):
        return tuple(numbers)
    raise PydanticCustomError("position", "Input should be a whole number, or a list of two")


INDEX_SCHEMA = {"type": "integer", "minimum": -(2**31), "exclusiveMaximum": 2**31}
POSITION_SCHEMA = {
    "anyOf": [INDEX_SCHEMA, {"type": "array", "items": INDEX_SCHEMA, "minItems": 1, "maxItems": 2}, {"type": "null"}]
}
# Not a union: its errors would each point to a member, not to a place in the request.
Position = Annotated[tuple[int, ...] | None, PlainValidator(_parse_position), WithJsonSchema(POSITION_SCHEMA)]


Class = Annotated[int, Field(ge=0, lt=2**31)] | Literal["top"] | None
Target = Annotated[list[Number], Field(min_length=1, max_length=1_000_000)] | None


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
            tuple(self.target) if self.target is not None else None,
            parse_selector(self.layer) if self.layer is not None else None,
            self.channel,
            self.position,
        )
