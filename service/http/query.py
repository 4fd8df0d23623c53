"""The part of a URL behind the question mark, and the fields of a body as it says them.

A field is a value, or JSON where a body has an object or a list.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from starlette.datastructures import QueryParams

from layertap.models.errors import Fault, LayertapError, RequestError, escape, find_nearest, suggest
from layertap.service.http.json_document import load_json

MAX_CACHED, MAX_CACHED_BYTES = 64, 512  # queries that are remembered, and how long each may be
MAX_LIST_ITEMS = 50_000  # in one parameter
MAX_DIGITS = 10  # of the number of a class
FLAGS = {"true": True, "1": True, "false": False, "0": False}
ALWAYS = frozenset({"format", "dry_run"})
BESIDE = {"class": "objective", "target": "objective"}  # whose part each is
ONLY_JSON = frozenset({"interventions"})
MAYBE_JSON = frozenset({"objective", "target", "method", "classes"})  # where it is an object or a list
HINTS = {  # of JSON that is broken
    "layers": 'write layers=["avgpool",{"layer":"layer2","pool":"mean"}], percent-encoded',
    "interventions": 'write interventions=[{"layer":"NAME","op":"zero"}], percent-encoded',
    "objective": 'write objective=logit, or objective={"kind":"logit","class":3}, percent-encoded',
}


@dataclass(frozen=True)
class Query:
    """A query as it was sent, and as it was read."""

    text: bytes
    parameters: QueryParams = field(compare=False)

    @classmethod
    def parse(cls, text: bytes) -> Query:
        """What was sent, read."""
        return _parse_cached(text) if len(text) <= MAX_CACHED_BYTES else cls(text, QueryParams(text))

    @property
    def is_cacheable(self) -> bool:
        """Whether what is made of it may be remembered."""
        return len(self.text) <= MAX_CACHED_BYTES

    def get_one(self, key: str) -> str | None:
        """What a parameter says, None where it is not given; RequestError where it is given several times."""
        values = self.parameters.getlist(key)
        if len(values) > 1:
            raise RequestError(f"the query parameter '{key}' is given {len(values)} times", hint="give it once")
        return values[0] if values else None

    def get_list(self, key: str) -> list[str]:
        """What a parameter says, once or several times, cut at commas."""
        return [item for value in self.parameters.getlist(key) for item in _split(value)]

    def get_flag(self, key: str) -> bool:
        """Whether a parameter says true; RequestError where it says neither that nor false."""
        value = self.get_one(key)
        flag = FLAGS.get("false" if value is None else value.lower())
        if flag is None:
            raise RequestError(f"'{key}' is true or false", hint=f"write {key}=true, or leave it out")
        return flag

    def check_names(self, allowed: AbstractSet[str], reason: str = "") -> None:
        """RequestError where a parameter is none of these; ``reason`` says why there are no others."""
        for key in self.parameters:
            if key not in allowed:
                offered = ", ".join(sorted(allowed))
                near = find_nearest(key, sorted(allowed))
                use = f"use {offered}" if offered else "leave it out"
                hint = f"{reason}; its query parameters are {offered}" if reason else suggest(near) or use
                raise RequestError(f"the query parameter {escape(key)} is not taken here", hint=hint)

    def check(self, allowed: AbstractSet[str]) -> None:
        """RequestError where a parameter is none of these, or given several times."""
        self.check_names(allowed)
        for key in allowed:
            self.get_one(key)


@lru_cache(maxsize=MAX_CACHED)
def _parse_cached(text: bytes) -> Query:
    """Remembered, as is the body in it: clients send the same over and over, and reading takes longer than all else."""
    return Query(text, QueryParams(text))


def read_fields(query: Query, names: AbstractSet[str], max_depth: int) -> dict[str, Any]:
    """The fields of a body that has these ``names``, as plain data.

    RequestError for a parameter that is none of them, or contradicts another; BadRequestError, TooLargeError for one
    that holds JSON as for a body, with its name as the pointer.
    """
    known = names | {part for part, whole in BESIDE.items() if whole in names}
    query.check_names(ALWAYS | known)
    return join_parts({name: _read_field(query, name, max_depth) for name in query.parameters if name in known})


def join_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with an objective by its kind as an object, and with what stands beside an object in it; RequestError."""
    joined = {name: value for name, value in fields.items() if name not in BESIDE}
    if isinstance(kind := joined.get("objective"), str):
        joined["objective"] = {"kind": kind}
    for name in (each for each in fields if each in BESIDE):
        whole = joined.setdefault(BESIDE[name], {})
        if not isinstance(whole, dict) or name in whole:
            detail = f"'{name}' beside a '{BESIDE[name]}' that has its own, or is no object"
            raise RequestError.from_faults([Fault(detail, "give it once", f"/{BESIDE[name]}")])
        joined[BESIDE[name]] = {**whole, name: fields[name]}
    return joined


def _read_field(query: Query, name: str, max_depth: int) -> Any:
    if name == "layers":
        return _read_layers(query, max_depth)
    value = query.get_one(name) or ""
    if name in ONLY_JSON or (name in MAYBE_JSON and _is_json(value)):
        return _load(name, value, max_depth)
    if name == "class":
        return _read_class(value)
    if name == "classes":
        return [_read_class(item) for item in _split(value)]
    return _split(value) if name == "method" else value


def _read_class(text: str) -> int | str:
    """The number of a class, or else the text as it is, for the body's own check."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else text


def _read_layers(query: Query, max_depth: int) -> list[Any]:
    """Selectors separated by commas, a layer as an object, a list of both; of a parameter that is repeated all."""
    layers: list[Any] = []
    for value in query.parameters.getlist("layers"):
        part = _load("layers", value, max_depth) if _is_json(value) else _split(value)
        layers += part if isinstance(part, list) else [part]
    return layers


def _split(value: str) -> list[str]:
    return [item for item in value.split(",", MAX_LIST_ITEMS) if item]


def _is_json(value: str) -> bool:
    """Whether a value is an object or a list; no layer's name begins so."""
    return value.lstrip()[:1] in ("[", "{")


def _load(name: str, value: str, max_depth: int) -> Any:
    try:
        return load_json(value.encode("utf-8", "surrogatepass"), max_depth, f"the query parameter '{name}'")
    except LayertapError as error:
        hint = HINTS.get(name, error.hint)
        raise type(error).from_faults([Fault(error.detail, hint, f"/{name}")]) from None
