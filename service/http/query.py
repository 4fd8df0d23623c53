"""Query parameters, and the fields of a body in them: as values, or as JSON for an object or a list."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from starlette.datastructures import QueryParams

from layertap.models.errors import Fault, RequestError, escape, find_nearest, suggest
from layertap.service.http.body import load_json
from layertap.service.schemas.base import FLAGS

MAX_LIST_ITEMS = 50_000  # in one parameter
MAX_DIGITS = 10  # of a class
ALWAYS = frozenset({"format", "dry_run"})
PARTS = {"class": "objective", "target": "objective"}  # parameters that are parts of an object
LISTS = frozenset({"layers", "method", "classes", "each", "values", "measures", "clamp"})  # separated by commas
OBJECTS = frozenset(
    ("objective", "target", "interventions", "generate", "resume", "baseline", "from", "tensor", "region", "project")
) | {"with"}
MAYBE_JSON = LISTS | OBJECTS  # if the value begins as a list or an object


class Query(QueryParams):
    """The parameters of a query."""

    def get_one(self, key: str) -> str | None:
        """The value of a parameter, None if it is missing; RequestError if it is given several times."""
        values = self.getlist(key)
        if len(values) > 1:
            raise RequestError(f"the query parameter '{key}' is given {len(values)} times", hint="give it once")
        return values[0] if values else None

    def get_flag(self, key: str) -> bool:
        """Whether a parameter is true; RequestError if it is neither true nor false."""
        value = self.get_one(key)
        flag = FLAGS.get("false" if value is None else value.lower())
        if flag is None:
            raise RequestError(f"'{key}' is true or false", hint=f"write {key}=true, or leave it out")
        return flag

    def check_names(self, allowed: AbstractSet[str], reason: str = "") -> None:
        """RequestError for a parameter that is not allowed; ``reason`` says why there are no others."""
        for key in self:
            if key not in allowed:
                offered = ", ".join(sorted(allowed))
                near = find_nearest(key, sorted(allowed))
                use = f"use {offered}" if offered else "leave it out"
                hint = f"{reason}; its query parameters are {offered}" if reason else suggest(near) or use
                raise RequestError(f"the query parameter {escape(key)} is not taken here", hint=hint)

    def check(self, allowed: AbstractSet[str]) -> None:
        """RequestError for a parameter that is not allowed, or given several times."""
        self.check_names(allowed)
        for key in allowed:
            self.get_one(key)


def read_fields(query: Query, names: AbstractSet[str]) -> dict[str, Any]:
    """The fields of a body with these ``names``, as plain data.

    RequestError for a parameter that is none of them, or contradicts another; errors of ``load_json``.
    """
    known = names | {part for part, whole in PARTS.items() if whole in names}
    query.check_names(ALWAYS | known)
    return join_parts({name: _read_field(query, name) for name in query if name in known})


def join_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with an objective's kind as an object, and with parts of an object put in it; RequestError."""
    joined = {name: value for name, value in fields.items() if name not in PARTS}
    if isinstance(kind := joined.get("objective"), str):
        joined["objective"] = {"kind": kind}
    for name in (each for each in fields if each in PARTS):
        whole = joined.setdefault(PARTS[name], {})
        if not isinstance(whole, dict) or name in whole:
            detail = f"'{name}' is given, and '{PARTS[name]}' has its own or is not an object"
            raise RequestError.from_faults([Fault(detail, "give it once", f"/{PARTS[name]}")])
        joined[PARTS[name]] = {**whole, name: fields[name]}
    return joined


def _read_field(query: Query, name: str) -> Any:
    if name != "layers":
        return _read_value(name, query.get_one(name) or "")
    values = (_read_value(name, value) for value in query.getlist(name))
    return [layer for value in values for layer in (value if isinstance(value, list) else [value])]


def _read_value(name: str, text: str) -> Any:
    if name in MAYBE_JSON and text.lstrip()[:1] in ("[", "{"):  # no layer's name begins so
        return load_json(text.encode(), name=f"the query parameter '{name}'")
    if name in LISTS:
        items = [item for item in text.split(",", MAX_LIST_ITEMS) if item]
        return [_read_class(item) for item in items] if name == "classes" else items
    return _read_class(text) if name == "class" else text


def _read_class(text: str) -> int | str:
    """The number of a class, or else the text, for the body's validation."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else text
