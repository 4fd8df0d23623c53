"""Scenarios: what a YAML file says, as requests whose bytes are ready to send."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlencode

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bench.load.bodies import Body, bad, jpeg, multipart, npy

GOOD, UNPROCESSABLE = 200, 422


class ScenarioError(Exception):
    """A file of scenarios can't be read or makes no sense."""


@dataclass(frozen=True)
class Scenario:
    """One kind of request: ``POST /extract?query`` with these bytes; ``headers`` name their content type.

    ``rows`` counts its inputs, ``expect`` the right statuses. The client leaves after ``leave_after`` seconds.
    """

    name: str
    query: str
    content: bytes = field(repr=False)
    headers: Mapping[str, str]
    rows: int = 1
    weight: float = 1.0
    expect: frozenset[int] = frozenset({GOOD})
    leave_after: float | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Picture(_Strict):
    """Either a file or what to draw."""

    file: str | None = None
    size: Annotated[list[Annotated[int, Field(ge=1, le=20_000)]], Field(min_length=2, max_length=2)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0


class _Input(_Strict):
    picture: Annotated[_Picture | None, BeforeValidator(lambda it: {"file": it} if isinstance(it, str) else it)] = None
    random: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=8)] | None = None
    bad: Literal[True] | None = None
    seed: Annotated[int, Field(ge=0)] = 0


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


Status = Annotated[int, Field(ge=100, le=599)]
Value = bool | str | int | float


class _Entry(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=60)]
    input: _Input
    layers: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    inputs: Annotated[int, Field(ge=1, le=100_000)] = 1
    expect: Annotated[list[Status], BeforeValidator(_listed), Field(min_length=1)] | None = None
    leave_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    headers: dict[str, Value] = {}
    query: dict[str, Value] = {}
    # The server's own query parameters, so that the usual ones need no `query`; what is None is not sent.
    model: str | None = None
    pool: str | None = None
    format: str | None = None
    normalize: bool | None = None
    dtype: str | None = None
    encoding: str | None = None
    on_error: str | None = None
    isolated: bool | None = None
    priority: Value | None = None


def read(path: Path) -> list[Scenario]:
    """The scenarios in a file; pictures are looked for beside it. ScenarioError says what is wrong, and where."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"can't read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ScenarioError(f"{path} is not YAML: {error}") from error
    try:
        return scenarios(data, path.parent)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from error


def scenarios(data: object, folder: Path) -> list[Scenario]:
    """The scenarios in what a file holds; ScenarioError."""
    if not isinstance(data, list) or not data:
        raise ScenarioError("this should be a list of scenarios: - name: …")
    found = [_scenario(number, each, folder) for number, each in enumerate(data, 1)]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ScenarioError(f"two scenarios are called {twice!r}")
    return found


def _scenario(number: int, data: object, folder: Path) -> Scenario:
    named = data.get("name") if isinstance(data, dict) else None
    place = f"scenario {number}" + (f" ({named})" if isinstance(named, str) else "")
    try:
        return _made(_Entry.model_validate(data), folder)
    except ValidationError as error:
        raise ScenarioError(f"{place}: {_complaint(error)}") from error
    except ScenarioError as error:
        raise ScenarioError(f"{place}: {error}") from error


def _made(entry: _Entry, folder: Path) -> Scenario:
    body = _body(entry.input, entry.inputs, folder)
    sent = {name: getattr(entry, name) for name in PARAMETERS if getattr(entry, name) is not None}
    query = {"layers": ",".join(entry.layers), **sent, **entry.query}
    return Scenario(
        name=entry.name,
        query=urlencode({name: _text(value) for name, value in query.items()}),
        content=body.content,
        headers={"Content-Type": body.media_type, **{name: _text(value) for name, value in entry.headers.items()}},
        rows=entry.inputs,
        weight=entry.weight,
        expect=frozenset(entry.expect or [UNPROCESSABLE if entry.input.bad else GOOD]),
        leave_after=entry.leave_after,
    )


def _body(wanted: _Input, inputs: int, folder: Path) -> Body:
    if sum(given is not None for given in (wanted.picture, wanted.random, wanted.bad)) != 1:
        raise ScenarioError("input: give exactly one of 'picture', 'random' and 'bad'")
    if wanted.random is not None:
        return npy(inputs, wanted.random, wanted.seed)
    if wanted.picture is None:
        return multipart([bad(wanted.seed + number) for number in range(inputs)])
    return multipart(_pictures(wanted.picture, inputs, folder))


def _pictures(wanted: _Picture, inputs: int, folder: Path) -> list[Body]:
    if wanted.file is not None and wanted.size is None:
        return [_file(folder / wanted.file)] * inputs
    if wanted.size is not None and wanted.file is None:
        width, height = wanted.size
        return [jpeg(width, height, wanted.seed + number) for number in range(inputs)]
    raise ScenarioError("input.picture: give a file, or {size: [WIDTH, HEIGHT], seed: 1}")


def _file(path: Path) -> Body:
    media_type = mimetypes.guess_type(path.name)[0] or ""
    if not media_type.startswith("image/"):
        raise ScenarioError(f"input.picture: the name {path.name!r} is not that of a picture: use .jpg, .png, .webp")
    try:
        return Body(path.read_bytes(), media_type)
    except OSError as error:
        raise ScenarioError(f"input.picture: can't read {path}: {error.strerror}") from error


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _complaint(error: ValidationError) -> str:
    """The first of pydantic's complaints: where, what, and what may have been meant."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = MESSAGES.get(first["type"], first["msg"])
    if first["type"] == "extra_forbidden":
        message += _near(str(first["loc"][-1]), KEYS.get(str(first["loc"][-2]) if first["loc"][1:] else "", _Entry))
    return f"{where}: {message}" if where else message


def _near(key: str, kind: type[BaseModel]) -> str:
    meant = get_close_matches(key, kind.model_fields, n=1)
    return f": did you mean {meant[0]!r}?" if meant else ": known are " + ", ".join(kind.model_fields)


PARAMETERS = ("model", "pool", "format", "normalize", "dtype", "encoding", "on_error", "isolated", "priority")
KEYS: dict[str, type[BaseModel]] = {"": _Entry, "input": _Input, "picture": _Picture}
MESSAGES = {
    "too_short": "these are too few values",
    "too_long": "these are too many values",
    "extra_forbidden": "there is no such key",
    "missing": "this is missing",
    "model_type": "this should be a mapping of keys to values",
    "model_attributes_type": "this should be a mapping of keys to values",
}
