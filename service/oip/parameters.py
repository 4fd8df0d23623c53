"""Parameters of requests, inputs and outputs: the protocol's own, those of other routes by the same names, refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from layertap.models.errors import RequestError, escape, find_nearest, suggest
from layertap.service.oip.schemas import InferParameters, InputParameters, OutputParameters
from layertap.service.schemas.bodies import ExtractBody
from layertap.service.schemas.layers import LayerBody
from layertap.service.schemas.validation_errors import convert_errors

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


def validate(kind: type[B], value: Any, where: str = "") -> B:
    """A part of a request; RequestError that says where, of several mistakes the first and all others beside it."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = convert_errors(error.errors(include_url=False, include_input=False, include_context=False))
        places = [f"{where}{fault.pointer or ''}".lstrip("/") for fault in faults]
        located = [
            replace(
                fault, detail=f"{place}: {fault.detail}" if place else fault.detail, hint=_keep_hint(kind, fault.hint)
            )
            for place, fault in zip(places, faults, strict=True)
        ]
        raise RequestError.from_faults(located) from None


def split_parameters(
    kind: type[P], given: Mapping[str, Any], others: AbstractSet[str], where: str
) -> tuple[P, dict[str, Any]]:
    """The protocol's own parameters, and others by their names; RequestError for what is neither."""
    known: frozenset[str] = frozenset(kind.model_fields)
    for name, value in given.items():
        if name not in known and name not in others:
            _refuse(name, value, sorted({*known, *others}), where)
    own = validate(kind, {name: given[name] for name in known & given.keys()}, where)
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


def _keep_hint(kind: type[BaseModel], hint: str) -> str:
    """A hint, where it is of a field that means the same on other routes."""
    return hint if kind in (ExtractBody, LayerBody) else ""
