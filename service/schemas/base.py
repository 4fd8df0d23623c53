"""What all bodies have in common: no unknown fields, few of them, and the numbers that several have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_FIELDS = 64
MAX_INDICES = 16_384

Index = Annotated[int, Field(ge=0, lt=2**31)]
SignedIndex = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # a negative one counts from the end
SignedIndices = Annotated[list[SignedIndex], Field(min_length=1, max_length=MAX_INDICES)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StrictBody(BaseModel):
    """A part of a body that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: Any) -> Any:
        # Each unknown field is an error of its own: of very many none is worth the time.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object here has at most {MAX_FIELDS} fields, this one has {len(value)}")
        return value
