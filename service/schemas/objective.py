"""The objective as a body describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from layertap.models.gradients.objectives import ObjectiveKind
from layertap.models.selection.hook_points import Objective
from layertap.models.selection.selectors import MAX_TEXT, parse_selector
from layertap.service.schemas.base import Index, Number, StrictBody


class ObjectiveBody(StrictBody):
    """What gradients are of."""

    kind: ObjectiveKind = "logit"
    klass: Annotated[int, Field(ge=0, lt=2**31)] | Literal["top"] | None = Field(None, alias="class")
    target: Annotated[list[Number], Field(min_length=1, max_length=1_000_000)] | None = None
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    channel: Index | None = None

    def to_objective(self) -> Objective:
        """What it means; SelectorError where its layer is no selector."""
        return Objective(
            self.kind,
            self.klass,
            tuple(self.target) if self.target is not None else None,
            parse_selector(self.layer) if self.layer is not None else None,
            self.channel,
        )
