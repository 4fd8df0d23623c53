"""The fields of a body as query parameters say them: a value each, or JSON where a body has an object or a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.service.http.json_document import load_json
from layertap.service.http.query import Query

ALWAYS = frozenset({"format", "dry_run"})
BESIDE = {"class": "objective", "target": "objective", "tiles": "picture", "order": "picture"}  # whose part each is
MAX_DIGITS = 10


def read_fields(query: Query, names: AbstractSet[str], max_depth: int) -> dict[str, Any]:
    """The fields of a body that has these ``names``, as plain data.

    RequestError for a parameter that is none of them, or contradicts another; BadRequestError, TooLargeError for one
    that holds JSON as for a body, with its name as the pointer.
    """
    parts = {name: whole for name, whole in BESIDE.items() if whole in names}
    query.check_names(ALWAYS | names | parts.keys())
    given = query.parameters.keys() & names
    fields: dict[str, Any] = {name: query.get_one(name) for name in given - READERS.keys()}
    fields |= {name: READERS[name](query, name, max_depth) for name in given & READERS.keys()}
    for whole in dict.fromkeys(parts.values()):
        given_parts = (name for name in parts if parts[name] == whole and name in query.parameters)
        if beside := {name: _read_value(query, name, max_depth) for name in given_parts}:
            fields[whole] = _join_parts(whole, fields.get(whole, {}), beside)
    return fields


def _read_layers(query: Query, name: str, max_depth: int) -> list[Any]:
    """Selectors separated by commas, a layer as an object, a list of both; of a parameter that is repeated all."""
    values = query.parameters.getlist(name)
    if not any(map(_is_json, values)):
        return query.get_list(name)
    layers: list[Any] = []
    for value in values:
        part = _load(name, value, max_depth) if _is_json(value) else [item for item in value.split(",") if item]
        layers += part if isinstance(part, list) else [part]
    return layers


def _read_names(query: Query, name: str, max_depth: int) -> Any:
    """A name, several separated by commas, or a list of them as JSON."""
    value = _read_value(query, name, max_depth)
    return [each for each in value.split(",") if each] if isinstance(value, str) and "," in value else value


def _read_classes(query: Query, name: str, max_depth: int) -> Any:
    """Classes separated by commas, or a list of them as JSON."""
    value = _read_value(query, name, max_depth)
    names = [each for each in value.split(",") if each] if isinstance(value, str) else value
    return [int(each) if _is_number(each) else each for each in names] if isinstance(names, list) else names


def _is_number(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS


def _read_objective(query: Query, name: str, max_depth: int) -> Any:
    """An objective as an object, or by its kind alone."""
    value = _read_value(query, name, max_depth)
    return {"kind": value} if isinstance(value, str) else value


def _read_json(query: Query, name: str, max_depth: int) -> Any:
    return _load(name, query.get_one(name) or "", max_depth)


def _read_value(query: Query, name: str, max_depth: int) -> Any:
    """JSON where it is an object or a list, else the text."""
    value = query.get_one(name) or ""
    return _load(name, value, max_depth) if _is_json(value) else value


def _is_json(value: str) -> bool:
    """Whether a value is an object or a list; no layer's name begins so."""
    return value.lstrip()[:1] in ("[", "{")


def _load(name: str, value: str, max_depth: int) -> Any:
    try:
        return load_json(value.encode("utf-8", "surrogatepass"), max_depth, f"the query parameter '{name}'")
    except LayertapError as error:
        hint = HINTS.get(name, error.hint)
        raise type(error).from_faults([Fault(error.detail, hint, f"/{name}")]) from None


def _join_parts(name: str, whole: Any, beside: Mapping[str, Any]) -> dict[str, Any]:
    """A field that is an object, with those of its parts that are parameters of their own."""
    if not isinstance(whole, dict) or whole.keys() & beside.keys():
        names = " and ".join(f"'{part}'" for part in sorted(beside))
        fault = Fault(f"{names} beside a '{name}' that has its own, or is no object", "give it once", f"/{name}")
        raise RequestError.from_faults([fault])
    return {**whole, **beside}


HINTS = {
    "layers": 'write layers=["avgpool",{"layer":"layer2","pool":"mean"}], percent-encoded',
    "interventions": 'write interventions=[{"layer":"NAME","op":"zero"}], percent-encoded',
    "objective": 'write objective=logit, or objective={"kind":"logit","class":3}, percent-encoded',
    "method": "write method=grad_cam,saliency",
    "classes": "write classes=3,5,top",
    "target": "write target=[0.25,0.75], a number for each class",
    "picture": 'write tiles=32&order=strongest, or picture={"tiles":32}, percent-encoded',
}
READERS: Mapping[str, Callable[[Query, str, int], Any]] = {
    "layers": _read_layers,
    "interventions": _read_json,
    "objective": _read_objective,
    "picture": _read_json,
    "method": _read_names,
    "classes": _read_classes,
}
