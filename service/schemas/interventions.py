"""Interventions as a body describes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from layertap.models.errors import SelectorError
from layertap.models.selection.hook_points import Intervention, Op, Operation, TensorData, TensorSource
from layertap.models.selection.selectors import MAX_TEXT, parse_selector
from layertap.service.inputs.arrays import require_finite
from layertap.service.schemas.base import Index, Number, SignedIndices, StrictBody, TensorBody
from layertap.service.schemas.layers import PlaceBody

MAX_INTERVENTIONS = 256
AS_THEY_ARE = (  # fields that an operation has too
    *("op", "by", "value", "min", "max", "std", "seed"),
    *("channels", "tokens", "heads", "queries", "keys"),
)


class SourceBody(StrictBody):
    """Where another input of the request has the tensor: at ``layer``, or at the point that is changed."""

    input: Index
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)

    def to_source(self) -> TensorSource:
        """What it means; SelectorError where its layer is no selector."""
        return TensorSource(self.input, parse_selector(self.layer) if self.layer is not None else None)


class InterventionBody(PlaceBody):
    """One entry of ``interventions``: where, and how the value there is changed."""

    op: Op
    by: Number | None = None
    value: Number | None = None
    min: Number | None = None
    max: Number | None = None
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    tensor: TensorBody | None = None
    source: SourceBody | None = Field(None, alias="from")
    channels: SignedIndices | None = None
    tokens: SignedIndices | None = None
    heads: SignedIndices | None = None
    queries: SignedIndices | None = None
    keys: SignedIndices | None = None
    region: Annotated[list[Index], Field(min_length=4, max_length=4)] | None = None

    def to_intervention(self) -> Intervention:
        """What it means; SelectorError, InputError where it makes no sense."""
        return Intervention(
            self.parse_place(),
            Operation(
                tensor=_read_finite(self.tensor) if self.tensor is not None else None,
                region=_to_box(self.region) if self.region is not None else None,
                source=self._read_source(),
                **{name: getattr(self, name) for name in AS_THEY_ARE},
            ),
        )

    def _read_source(self) -> TensorSource | None:
        if self.source is not None and self.tensor is not None:
            raise SelectorError("a tensor is sent, or taken 'from' another input, not both", hint="leave one out")
        return self.source.to_source() if self.source is not None else None


def _read_finite(body: TensorBody) -> TensorData:
    array = body.to_array()
    require_finite(array)
    return TensorData(tuple(body.shape), array.astype("<f4").tobytes())


def _to_box(region: list[int]) -> tuple[int, int, int, int]:
    top, left, bottom, right = region
    return top, left, bottom, right
