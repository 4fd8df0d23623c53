"""Tensors in a JSON body."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from layertap.service.inputs.arrays import Array, decode_base64, read_tensor
from layertap.service.schemas.base import StrictBody


class TensorBody(StrictBody):
    """A tensor: little-endian bytes in C order, as base64."""

    dtype: str = Field(max_length=16)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=8)
    data: str

    def to_array(self) -> Array:
        """The tensor as an array; InputError where its bytes and its shape do not fit each other."""
        return read_tensor(self.dtype, self.shape, decode_base64(self.data))
