"""Parameters of requests, inputs and outputs: the protocol's own, those of other routes by the same names, refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from pydantic import BaseModel

from layertap.models.errors import RequestError, escape, find_nearest, suggest
from layertap.service.oip.schemas import InferParameters, InputParameters, OutputParameters
from layertap.service.schemas.layers import LayerBody
from layertap.service.schemas.validation_errors import validate

B = TypeVar("B", bound=BaseModel)
P = TypeVar("P", InferParameters, InputParameters, OutputParameters)
# Those fields of other routes' bodies that mean something here.
OF_REQUEST = frozenset(
    {
        *("pool", "normalize", "dtype", "interventions", "resume", "verify", "isolated", "prompt", "truncate"),
        *("objective", "class", "target"),
    }
)
OF_OUTPUT = frozenset(LayerBody.model_fields) - {"layer", "type", "call", "path", "site", "alias"}
REFUSED = {  # by how names begin
    "sequence_": ("sequences are not offered", "models keep nothing from one request to the next"),
    "shared_memory_": ("shared memory is not offered", "send the bytes behind the JSON"),
    "classification": (
        "classification is not offered",
        "ask for the scores; GET /models/NAME/labels has the names",
    ),
}


def split_parameters(
    kind: type[P], given: Mapping[str, Any], others: AbstractSet[str], where: str
) -> tuple[P, dict[str, Any]]:
    """The protocol's own parameters, and others by their names; RequestError for what is neither."""
    known: frozenset[str] = frozenset(kind.model_fields)
    for name, value in given.items():
        if name not in known and name not in others:
            _refuse(name, value, sorted({*known, *others}), where)
    own = validate(kind, {name: given[name] for name in known & given.keys()}, f"/{where}")
    return own, {name: given[name] for name in others & given.keys()}


def _refuse(name: str, value: Any, known: Iterable[str], where: str) -> None:
    """RequestError for a parameter that is not known, unless it says that there is no such thing."""
    refusal = next((words for begin, words in REFUSED.items() if name.startswith(begin)), None)
    if refusal is None:
        offered = tuple(known)
        hint = suggest(find_nearest(name, offered)) or (f"use {', '.join(offered)}" if offered else "")
        raise RequestError(f"{where}: the parameter {escape(name)} is not taken", hint=hint)
    if value:
        raise RequestError(f"{where}: {refusal[0]}", hint=refusal[1])
