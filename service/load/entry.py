"""An entry of a scenario as a file has it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

RouteName = Literal["extract", "explain", "embeddings", "infer"]
Status = Annotated[int, Field(ge=100, le=599)]
Value = bool | str | int | float
MAX_DRAWN = 1000
MAX_WEIGHT = 1e9
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # of RFC 9110, section 5.6.2
FRAMING = frozenset({"content-length", "transfer-encoding"})


class Strict(BaseModel):
    """No key but those that are known."""

    model_config = ConfigDict(extra="forbid")


class PictureEntry(Strict):
    """Either a file, or a folder of them, or what to draw: ``count`` different pictures of one size."""

    file: str | None = None
    size: Annotated[list[Annotated[int, Field(ge=1, le=20_000)]], Field(min_length=2, max_length=2)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=1, le=MAX_DRAWN)] = 1


class InputEntry(Strict):
    """One of ``picture``, ``random`` (a row's shape) and ``bad``; ``name`` is the model's, of rows by ``infer``."""

    picture: Annotated[PictureEntry | None, BeforeValidator(lambda it: {"file": it} if isinstance(it, str) else it)] = (
        None
    )
    random: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=8)] | None = None
    bad: Literal[True] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    name: str | None = None


def _make_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _check_headers(headers: dict[str, Value]) -> dict[str, Value]:
    for name, value in headers.items():
        if name.lower() in FRAMING:
            raise ValueError(f"{name!r} is written by the tester")
        if not (TOKEN.fullmatch(name) and str(value).isascii() and str(value).isprintable()):
            raise ValueError(f"{name!r} or its value is none that can be sent")
    return headers


class Entry(Strict):
    """A kind of request; what is None is not sent."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    input: InputEntry
    route: RouteName = "extract"
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT, allow_inf_nan=False)] = 1.0
    inputs: Annotated[int, Field(ge=1, le=100_000)] = 1
    expect: Annotated[list[Status], BeforeValidator(_make_list), Field(min_length=1)] | None = None
    leave_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    headers: Annotated[dict[str, Value], AfterValidator(_check_headers)] = {}
    query: dict[str, Value] = {}
    # Of the routes, so that the usual ones need no ``query``: which of them takes what stands in routes.py.
    model: str | None = None
    layers: Annotated[list[str], BeforeValidator(_make_list), Field(min_length=1)] | None = None
    method: Annotated[list[str], BeforeValidator(_make_list), Field(min_length=1)] | None = None
    classes: Annotated[list[int | str], BeforeValidator(_make_list), Field(min_length=1)] | None = None
    layer: str | None = None
    pool: str | None = None
    format: str | None = None
    normalize: bool | None = None
    dtype: str | None = None
    encoding: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    on_error: str | None = None
    isolated: bool | None = None
    priority: Value | None = None


COMMON = frozenset(("name", "input", "route", "weight", "inputs", "expect", "leave_after", "headers", "query"))
OPTIONS = frozenset(Entry.model_fields) - COMMON
