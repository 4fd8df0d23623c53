"""Shared parts of bodies: no unknown fields, numbers, tensors, and errors of single fields as faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

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
MAX_RATE = 1_000_000
Rate = Annotated[int | None, Field(None, ge=1, le=MAX_RATE, description="samples a second")]
Number = Annotated[float, Field(allow_inf_nan=False)]
FLAGS = {"true": True, "1": True, "false": False, "0": False}  # in a query


def _read_flag(value: object) -> object:
    flag = FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool) and value is not None:
        raise PydanticCustomError("flag", "Input should be true or false")
    return flag


Flag = Annotated[bool, BeforeValidator(_read_flag)]


@dataclass(frozen=True)
class OneError:
    """An annotation for a type: all errors of a value become one error, at the value itself.

    A union's errors would point to its types, not to a place in the request; of very many wrong entries, one error is
    enough.
    """

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The type's own schema, with its errors replaced."""
        return core_schema.custom_error_schema(handler(source), "value", custom_error_message=self.message)


def make_list(value: object) -> object:
    """The value, in a list if it is none; for types that take both."""
    return value if isinstance(value, list) or value is None else [value]


class StrictBody(BaseModel):
    """A part of a body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: Any) -> Any:
        # Each unknown field is an error of its own; for very many, these would take too long.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object here has at most {MAX_FIELDS} fields, this one has {len(value)}")
        return value


class TensorBody(StrictBody):
    """A tensor: little-endian bytes in C order, as base64."""

    dtype: str = Field(max_length=16)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=8)
    data: str

    def to_array(self) -> Array:
        """The tensor as an array; InputError if its bytes do not fit its shape."""
        return read_tensor(self.dtype, self.shape, decode_base64(self.data))


def read_field(pointer: str, read: Callable[[], T]) -> T:
    """The result of ``read`` for one field; RequestError with its pointer."""
    try:
        return read()
    except LayertapError as error:
        raise RequestError.from_faults([error.to_fault(pointer)]) from None


def read_items(bodies: Iterable[B], name: str, read: Callable[[B], T]) -> tuple[list[tuple[int, T]], list[Fault]]:
    """The result of ``read`` for each input of a list, with its index, and a fault for each bad one."""
    items: list[tuple[int, T]] = []
    faults: list[Fault] = []
    for index, body in enumerate(bodies):
        try:
            items.append((index, read(body)))
        except RequestError as error:
            faults.append(error.to_fault(f"/{name}/{index}", index))
    return items, faults


def read_entries(bodies: Iterable[B], name: str, read: Callable[[B], T]) -> tuple[T, ...]:
    """The result of ``read`` for each entry of a list; RequestError with a fault for each bad one."""
    entries, faults = read_items(bodies, name, read)
    if faults:
        raise RequestError.from_faults([replace(fault, input=None) for fault in faults])
    return tuple(entry for _, entry in entries)
