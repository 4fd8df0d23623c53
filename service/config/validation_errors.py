"""Pydantic's errors about a configuration file as mistakes: where, and what in words of ours."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from layertap.models.errors import find_nearest
from layertap.models.sources.check import Place
from layertap.service.config.document import Mistake
from layertap.service.config.schema import FIELDS

UNION_MEMBERS = (
    "literal[",
    "PreprocessSpec",
    "EmbeddingSpec",
    "tuple[",
)  # what pydantic calls members of a union in a place
UNKNOWN_FIELD = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
MESSAGES = {
    "model_type": "this is no mapping of names to values",
    "dataclass_type": "this is no mapping of names to values",
}


def describe_errors(error: ValidationError) -> Iterator[Mistake]:
    """Pydantic's errors, each place once: of those of a union's members the one that goes deepest."""
    messages: dict[Place, str] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = tuple(part for part in each["loc"] if not _is_member(part))
        if place not in messages or _get_reason(each):
            messages[place] = _describe_error(each, place)
    for place, text in messages.items():
        if not any(other[: len(place)] == place for other in messages if other != place):
            yield place, text


def _is_member(part: str | int) -> bool:
    return part in ("int", "str") or str(part).startswith(UNION_MEMBERS)


def _describe_error(error: ErrorDetails, place: Place) -> str:
    if error["type"] in UNKNOWN_FIELD:
        return f"there is no such field; the nearest is {_find_nearest(str(place[-1]), place[:-1])!r}"
    return _get_reason(error) or MESSAGES.get(error["type"], error["msg"])


def _find_nearest(name: str, parent: Place) -> str:
    known = FIELDS[tuple("*" if isinstance(part, int) else part for part in parent)]
    return find_nearest(name, known, cutoff=0.0)[0]


def _get_reason(error: ErrorDetails) -> str:
    """What a dataclass of ours says, without pydantic's words."""
    return str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
