"""Documents become model specs; one mistake hides no other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from layertap.models.sources.grammar import is_checkpoint
from layertap.models.sources.table import SOURCES
from layertap.models.spec import ModelSpec
from layertap.service.config.checks import check_specs
from layertap.service.config.document import Document, Mistake
from layertap.service.config.schema import SPEC_ADAPTER, ConfigFile
from layertap.service.config.validation_errors import describe_errors


@dataclass(frozen=True)
class ParsedEntries:
    """What a file says and what is wrong with it; ``specs`` by the entry's number, of refused ones what is good."""

    specs: dict[int, ModelSpec]
    default: str
    mistakes: list[Mistake]


def parse_document(document: Document) -> ParsedEntries:
    """What shows in the file alone."""
    default, mistakes = _get_default(document.data), list[Mistake]()
    refused: dict[object, set[object]] = {}
    try:
        default = ConfigFile.model_validate(document.data).defaults.model
    except ValidationError as error:
        mistakes += describe_errors(error)
        refused = _list_refused(error)
    specs, names = {}, list[str | None]()
    for number, entry in enumerate(_get_entries(document.data)):
        spec = _parse_entry(entry, refused.get(number, set()))
        if spec is not None:
            specs[number] = _resolve_paths(spec, document.path.parent)
        names.append(_get_text(entry, "name") if spec is None or number in refused else spec.name)
    default = default or next(iter(names), None) or ""
    mistakes += check_specs(specs, refused.keys(), names, default)
    return ParsedEntries(specs, default, mistakes)


def _list_refused(error: ValidationError) -> dict[object, set[object]]:
    """The fields that are refused, by the entry's number."""
    refused: dict[object, set[object]] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = each["loc"]
        if len(place) > 1 and place[0] == "models":
            refused.setdefault(place[1], set()).update(place[2:3])
    return refused


def _get_entries(data: object) -> list[object]:
    entries = data.get("models") if isinstance(data, dict) else None
    return entries if isinstance(entries, list) else []


def _get_default(data: object) -> str | None:
    return _get_text(data.get("defaults"), "model") if isinstance(data, dict) else None


def _get_text(data: object, name: str) -> str | None:
    """A text in what may be a mapping; None where there is none."""
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _parse_entry(entry: object, refused: set[object]) -> ModelSpec | None:
    """An entry without the fields that are refused, so that the others are checked too; None where that is none."""
    if not isinstance(entry, dict):
        return None
    fields = {name: value for name, value in entry.items() if name not in refused}
    try:
        return SPEC_ADAPTER.validate_python({"name": "", **fields} if refused else fields)
    except ValidationError:
        return None


def _resolve_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with relative paths of its source, weights and labels taken from the file's folder."""
    kind, _, ident = spec.source.partition(":")
    if kind in SOURCES and SOURCES[kind].has_path(ident):
        spec = replace(spec, source=f"{kind}:{_resolve(ident, folder)}")
    if isinstance(spec.labels, str):
        spec = replace(spec, labels=_resolve(spec.labels, folder))
    return replace(spec, weights=_resolve(spec.weights, folder)) if is_checkpoint(spec.weights) else spec


def _resolve(path: str, folder: Path) -> str:
    """A path from a folder, unless it is absolute; a slash at its end stays."""
    return f"{(folder / path).absolute()}{'/' if path.endswith('/') else ''}"
