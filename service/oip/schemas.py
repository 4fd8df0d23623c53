"""The JSON of an inference request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, StrictBool

from layertap.models.plan.selectors import MAX_TEXT
from layertap.service.schemas.base import MAX_FIELDS, StrictBody

Size = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class InputParameters(StrictBody):
    """The parameters of an input; others are ignored."""

    model_config = ConfigDict(extra="ignore")

    binary_data_size: Count | None = None  # bytes after the JSON
    content_type: Any = None  # of MLServer: "base64"; all others repeat the datatype


class OutputParameters(StrictBody):
    """The parameters of an output; others are ignored unless they would change it."""

    model_config = ConfigDict(extra="allow")

    binary_data: StrictBool | None = None  # whether it is sent after the JSON


class InferParameters(StrictBody):
    """The parameters of an inference, and fields of ``POST /extract``; others are ignored, with a warning."""

    model_config = ConfigDict(extra="allow")

    content_type: Any = None  # of MLServer: without effect
    binary_data_output: StrictBool = False
    priority: Count = 0  # 1 is the highest, 0 the default
    timeout: Count = 0  # microseconds; 0: none


class InputTensor(StrictBody):
    """An input: its numbers in ``data``, nested or flat, or as bytes after the JSON."""

    name: str = Field(min_length=1, max_length=256)
    shape: Annotated[list[Size], Field(max_length=8)]
    datatype: str = Field(max_length=16)
    parameters: InputParameters = InputParameters()
    data: Any = None  # validated elsewhere: it may have millions of numbers


class OutputBody(StrictBody):
    """A requested output: a layer's selector, or the model's embedding."""

    name: str = Field(max_length=MAX_TEXT)
    parameters: OutputParameters = OutputParameters()


class InferBody(StrictBody):
    """The body of an inference; ``model_name`` and ``model_version`` are ignored, because the path has them."""

    id: str = Field("", max_length=1024)
    model_name: str | None = Field(None, max_length=256)
    model_version: str | None = Field(None, max_length=256)
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=MAX_FIELDS), FailFast()]
    outputs: Annotated[list[OutputBody], Field(default_factory=list, max_length=50_000), FailFast()]
