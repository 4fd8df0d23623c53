"""What bodies have in common: no unknown fields, numbers, tensors, and errors of single fields as faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.service.inputs.arrays import Array, decode_base64, read_tensor

B = TypeVar("B")
T = TypeVar("T")
MAX_FIELDS = 64
MAX_INDICES = 16_384

Index = Annotated[int, Field(ge=0, lt=2**31)]
SignedIndex = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # a negative one counts from the end
StrictIndex = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
SignedIndices = Annotated[tuple[SignedIndex, ...], Field(min_length=1, max_length=MAX_INDICES)]
Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class OneError:
    """An annotation of a type: whatever is wrong with a value is one error, at the value itself.

    Those of a union would each point to one of its types, not to a place in the request, and of very many entries that
    are wrong one is enough.
    """

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The type's own schema, with its errors replaced."""
        return core_schema.custom_error_schema(handler(source), "value", custom_error_message=self.message)


def make_list(value: object) -> object:
    """A value, or a list of it where it is none; for types that take both."""
    return value if isinstance(value, list) or value is None else [value]


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


class TensorBody(StrictBody):
    """A tensor: little-endian bytes in C order, as base64."""

    dtype: str = Field(max_length=16)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=8)
    data: str

    def to_array(self) -> Array:
        """The tensor as an array; InputError where its bytes and its shape do not fit each other."""
        return read_tensor(self.dtype, self.shape, decode_base64(self.data))


def read_field(pointer: str, read: Callable[[], T]) -> T:
    """What one field means; RequestError with its pointer."""
    try:
        return read()
    except LayertapError as error:
        raise RequestError.from_faults([error.to_fault(pointer)]) from None


def read_items(bodies: Iterable[B], name: str, read: Callable[[B], T]) -> tuple[list[tuple[int, T]], list[Fault]]:
    """What each input of a list means, behind its place, and a fault for each bad one."""
    items: list[tuple[int, T]] = []
    faults: list[Fault] = []
    for index, body in enumerate(bodies):
        try:
            items.append((index, read(body)))
        except RequestError as error:
            faults.append(error.to_fault(f"/{name}/{index}", index))
    return items, faults


def read_entries(bodies: Iterable[B], name: str, read: Callable[[B], T]) -> tuple[T, ...]:
    """What each entry of a list means; RequestError with a fault for each bad one."""
    entries, faults = read_items(bodies, name, read)
    if faults:
        raise RequestError.from_faults([replace(fault, input=None) for fault in faults])
    return tuple(entry for _, entry in entries)
