"""The file as pydantic reads it, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from layertap.models.errors import find_nearest
from layertap.models.sources.check import Place
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec, PreprocessSpec, WarmSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.document import Mistake

strict = with_config(ConfigDict(extra="forbid"))  # of the class, and of what stands in it


@dataclass(frozen=True)
class Defaults:
    """What requests get that do not say."""

    model: str | None = None


@strict
@dataclass(frozen=True)
class ConfigFile:
    """The whole file."""

    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]
    defaults: Defaults = Defaults()
    aliases: dict[str, str] = field(default_factory=dict)
    allow: Allowed | None = None


ADAPTER = TypeAdapter(ConfigFile)
CLASSES: dict[Place, Any] = {
    (): ConfigFile,
    ("defaults",): Defaults,
    ("allow",): Allowed,
    ("models", "*"): ModelSpec,
    ("models", "*", "embedding"): EmbeddingSpec,
    ("models", "*", "preprocess"): PreprocessSpec,
    ("models", "*", "inputs", "*"): InputSpec,
    ("models", "*", "warm", "*"): WarmSpec,
}
# Fields of several types: below them pydantic names the type that it tried.
UNIONS = frozenset({"embedding", "preprocess", "labels", "resize", "crop"})


def read_file(data: object) -> tuple[ConfigFile | None, list[Mistake]]:
    """What a file says; None, and what is wrong with it, where it makes no sense."""
    try:
        return ADAPTER.validate_python(data), []
    except ValidationError as error:
        return None, list(_describe(error))


def _describe(error: ValidationError) -> Iterator[Mistake]:
    """Pydantic's errors, each place once: of those of a union's members the one that goes deepest."""
    messages: dict[Place, str] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = tuple(part for before, part in pairwise(("", *each["loc"])) if before not in UNIONS)
        if place not in messages or each["type"] == "value_error":
            messages[place] = _write_message(each, place)
    for place, text in messages.items():
        if not any(other[: len(place)] == place for other in messages if other != place):
            yield place, text


def _write_message(error: ErrorDetails, place: Place) -> str:
    match error["type"]:
        case "unexpected_keyword_argument":
            kind = CLASSES[tuple("*" if isinstance(part, int) else part for part in place[:-1])]
            [nearest, *_] = find_nearest(str(place[-1]), [each.name for each in fields(kind)], cutoff=0.0)
            return f"there is no such field; the nearest is {nearest!r}"
        case "dataclass_type":
            return "this is no mapping of names to values"
        case "tuple_type":  # which YAML does not have
            return "Input should be a valid list"
        case "value_error":  # of a dataclass of ours, without pydantic's words
            return str(error["ctx"]["error"])
        case _:
            return error["msg"]
