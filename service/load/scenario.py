"""Scenarios: what a YAML file says, as kinds of requests."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from layertap.service.load.entry import Entry, InputEntry, PictureEntry
from layertap.service.load.inputs import make_inputs
from layertap.service.load.request_kind import OK, Body, RequestKind, ScenarioError
from layertap.service.load.routes import find_route, format_value

Scenario = tuple[RequestKind, ...]
FOLDER = Path(__file__).parent / "scenarios"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def find_scenario(name: str) -> Scenario:
    """The scenario of a file, or the one that comes with the command under this name; ScenarioError."""
    if name in BUILT_IN:
        return read_scenario(FOLDER / f"{name}.yaml")
    path = Path(name)
    if not path.exists() and path.name == name and not path.suffix:
        raise ScenarioError(f"there is no scenario {name!r}", hint=f"a file, or one of {', '.join(BUILT_IN)}")
    return read_scenario(path)


def read_scenario(path: Path) -> Scenario:
    """The kinds of requests in a file, beside which pictures are looked for; ScenarioError says what is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"can't read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of dates and numbers that are none
        raise ScenarioError(f"{path} is not YAML: {error}") from error
    try:
        return make_scenario(data, path.parent)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error.detail}") from error


def make_scenario(data: object, folder: Path) -> Scenario:
    """The kinds of requests that a file's content means; ScenarioError."""
    if not isinstance(data, list) or not data:
        raise ScenarioError("this should be a list of kinds of requests: - name: …")
    kinds = tuple(_make_place(number, each, folder) for number, each in enumerate(data, 1))
    names = [each.name for each in kinds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ScenarioError(f"two kinds of requests are called {twice!r}")
    return kinds


def _make_place(number: int, data: object, folder: Path) -> RequestKind:
    named = data.get("name") if isinstance(data, dict) else None
    place = f"request {number}" + (f" ({named})" if isinstance(named, str) else "")
    try:
        return make_kind(Entry.model_validate(data), folder)
    except ValidationError as error:
        raise ScenarioError(f"{place}: {_format_fault(error)}") from error
    except ScenarioError as error:
        raise ScenarioError(f"{place}: {error.detail}") from error


def make_kind(entry: Entry, folder: Path) -> RequestKind:
    """What an entry means; ScenarioError."""
    route = find_route(entry)
    more = {name: format_value(value) for name, value in entry.headers.items()}
    made = [route.make_body(entry, inputs) for inputs in make_inputs(entry.input, entry.inputs, folder)]
    return RequestKind(
        name=entry.name,
        path=route.make_path(entry),
        bodies=tuple(Body(content, {**headers, **more}) for content, headers in made),
        rows=entry.inputs,
        weight=entry.weight,
        expect=frozenset(entry.expect or [route.refusal if entry.input.bad else OK]),
        leave_after=entry.leave_after,
    )


def _format_fault(error: ValidationError) -> str:
    """The first of pydantic's: where, what, and what may have been meant."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == "extra_forbidden":
        message += _suggest(str(first["loc"][-1]), KEYS.get(str(first["loc"][-2]) if first["loc"][1:] else "", Entry))
    return f"{where}: {message}" if where else message


def _suggest(key: str, kind: type[BaseModel]) -> str:
    meant = get_close_matches(key, kind.model_fields, n=1)
    return f": did you mean {meant[0]!r}?" if meant else ": known are " + ", ".join(kind.model_fields)


KEYS: dict[str, type[BaseModel]] = {"": Entry, "input": InputEntry, "picture": PictureEntry}
MESSAGES = {
    "too_short": "these are too few values",
    "too_long": "these are too many values",
    "extra_forbidden": "there is no such key",
    "missing": "this is missing",
    "model_type": "this should be a mapping of keys to values",
    "model_attributes_type": "this should be a mapping of keys to values",
}
