"""Converts pydantic's errors to faults: where and what, with a hint for each field, never the input."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from layertap.models.errors import Fault, RequestError, escape, find_nearest, suggest
from layertap.service.schemas.base import TensorBody
from layertap.service.schemas.bodies import ExplainBody, ExtractBody, InputsBody
from layertap.service.schemas.inputs import InputBody
from layertap.service.schemas.selection import InterventionBody, LayerBody, ObjectiveBody

B = TypeVar("B", bound=BaseModel)
MAX_WORDS = 16  # of a list that are compared with what is allowed


def validate(kind: type[B], value: Any, where: str = "") -> B:
    """Parse a body from plain data, or the part at ``where``; RequestError with a fault for each mistake."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = convert_errors(
            error.errors(include_url=False, include_context=False),
            where,
            with_hints=issubclass(kind, (InputsBody, LayerBody)),
            kind=kind,
        )
        detail = f"{faults[0].pointer}: {faults[0].detail}" if faults[0].pointer else faults[0].detail
        raise RequestError(detail, faults=faults) from None


def convert_errors(
    errors: Iterable[ErrorDetails], where: str = "", *, with_hints: bool = True, kind: type[BaseModel] | None = None
) -> tuple[Fault, ...]:
    """Pydantic's errors as faults: where and what, never the input; hints are for the fields of our own routes.

    ``kind``: the body that they are of, if it is one.
    """
    return tuple(
        Fault(_get_message(each), _get_hint(each, kind) if with_hints else "", where + _make_pointer(each["loc"]))
        for each in errors
    )


def _get_message(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f"there is no field {escape(str(error['loc'][-1]))}"
    if error["type"] == "model_type":
        return "Input should be an object"
    return str(error["msg"])[:400].replace("Tuple", "List").replace("valid tuple", "valid list")  # JSON's word


def _get_hint(error: ErrorDetails, kind: type[BaseModel] | None) -> str:
    names = [part for part in error["loc"] if isinstance(part, str)]
    if not names:
        return ""
    if error["type"] == "extra_forbidden":
        # It may be known elsewhere, but is refused here.
        known = sorted(_list_names(_find_objects(names[:-1], kind))), sorted(FIELDS - {names[-1]})
        near = next(filter(None, (find_nearest(names[-1], each) for each in known)), ())
        return ELSEWHERE.get(names[-1]) or suggest(near)
    return suggest(_find_meant(error)) or HINTS.get(names[-1], "")


def _find_objects(path: Iterable[str], kind: type[BaseModel] | None) -> list[type[BaseModel]]:
    """The objects that a body may have at a path, which may also name what pydantic tried there."""
    objects = [kind] if kind is not None else []
    for part in path:
        fields = [field for each in objects for name, field in each.model_fields.items() if part in (name, field.alias)]
        objects = [each for field in fields for each in _list_objects(field.annotation)] or objects
    return objects


def _list_objects(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in get_args(annotation) for each in _list_objects(part)]


def _list_names(models: Iterable[type[BaseModel]]) -> set[str]:
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def _find_meant(error: ErrorDetails) -> tuple[str, ...]:
    """The allowed value, quoted in the message, that is most like the one sent."""
    allowed, sent = QUOTED.findall(error["msg"]), error.get("input")
    words = sent[:MAX_WORDS] if isinstance(sent, list) else [sent]
    wrong = next((word for word in words if isinstance(word, str) and word not in allowed), "")
    if SYNONYMS.get(wrong) in allowed:
        return (SYNONYMS[wrong],)
    return find_nearest(wrong, allowed, cutoff=0.7)


def _make_pointer(loc: tuple[int | str, ...]) -> str:
    parts = [escape(str(part))[1:-1].replace("~", "~0").replace("/", "~1") for part in loc]
    return "".join(f"/{part}" for part in parts)[:200]


FIELDS = _list_names((ExtractBody, ExplainBody, LayerBody, InputBody, TensorBody, InterventionBody, ObjectiveBody))
SYNONYMS = {"avg": "mean", "average": "mean", "gap": "mean"}  # what other libraries call a value
QUOTED = re.compile(r"'(\w+)'")
ELSEWHERE = {  # fields that are known, but in another place
    "class": 'write "objective": {"class": 3}, or "class" in an entry of "inputs"',
    "target": 'write "objective": {"kind": "cross_entropy", "target": […]}, or "target" in an entry of "inputs"',
    "interventions": "send interventions to POST /extract; an entry of its inputs may have its own",
}
HINTS = {  # if the message does not show what to write
    "layers": 'write "layers": ["NAME", …], or ?layers=NAME,NAME',
    "method": 'write "method": "grad_cam", or ?method=grad_cam; GET /docs lists all methods',
    "inputs": 'write "inputs": [{"image": "<base64>"}]',
    "text": 'write {"text": "a cat"}',
    "tensor": 'write {"dtype": "float32", "shape": [3, 32, 32], "data": "<base64>"}',
    "tensors": 'write {"NAME": {"dtype": "float32", "shape": [3, 32, 32], "data": "<base64>"}}',
    "as": "use 1 to 128 of letters, digits, '_', '-' and '.'",
    "objective": 'write "objective": {"kind": "logit", "class": "top"}',
    "interventions": 'write "interventions": [{"layer": "NAME", "op": "zero"}]',
    "region": "write [top, left, bottom, right]",
}
