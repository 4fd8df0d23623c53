"""Documents become model specs; one mistake hides no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from layertap.models.errors import Fault, RequestError, find_nearest
from layertap.models.sources.check import Place
from layertap.models.sources.grammar import is_checkpoint
from layertap.models.sources.table import SOURCES
from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.checks import check_aliases, check_specs
from layertap.service.config.document import Document, Mistake
from layertap.service.config.schema import FIELDS, SPEC_ADAPTER, Allow, ConfigFile

# What pydantic calls members of a union in a place.
UNION_MEMBERS = ("literal[", "PreprocessSpec", "EmbeddingSpec", "tuple[")
UNKNOWN_FIELD = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
MESSAGES = {
    "model_type": "this is no mapping of names to values",
    "dataclass_type": "this is no mapping of names to values",
}


@dataclass(frozen=True)
class ParsedEntries:
    """What a file says and what is wrong with it; ``specs`` by the entry's number, of refused ones what is good."""

    specs: dict[int, ModelSpec]
    default: str
    mistakes: list[Mistake]
    aliases: Mapping[str, str]
    allowed: Allowed | None


def parse_document(document: Document) -> ParsedEntries:
    """What shows in the file alone."""
    default, mistakes, folder = _get_default(document.data), list[Mistake](), document.path.parent
    refused: dict[object, set[object]] = {}
    aliases, allowed = dict[str, str](), None
    try:
        file = ConfigFile.model_validate(document.data)
        default, aliases = file.defaults.model, file.aliases
        allowed = _resolve_allowed(file.allow, folder) if file.allow is not None else None
    except ValidationError as error:
        mistakes += describe_errors(error)
        refused = _list_refused(error)
    specs, names = {}, list[str | None]()
    for number, entry in enumerate(_get_entries(document.data)):
        spec = _parse_entry(entry, refused.get(number, set()))
        if spec is not None:
            specs[number] = _resolve_paths(spec, folder)
        names.append(_get_text(entry, "name") if spec is None or number in refused else spec.name)
    default = default or next(iter(names), None) or ""
    mistakes += check_specs(specs, refused.keys(), names, default)
    mistakes += check_aliases(aliases, names)
    return ParsedEntries(specs, default, mistakes, aliases, allowed)


def parse_entry(data: object, folder: Path) -> ModelSpec:
    """A model as an entry of a file in a folder describes it; RequestError with what is wrong, and where."""
    entries = parse_document(Document(folder / "entry", {"models": [data]}, None))
    if entries.mistakes:
        raise RequestError.from_faults(
            [Fault(text, pointer="".join(f"/{part}" for part in place[2:])) for place, text in entries.mistakes]
        )
    return entries.specs[0]


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
    """The spec with relative paths of its source, weights, adapter, labels and examples made absolute."""
    labels = _resolve(spec.labels, folder) if isinstance(spec.labels, str) else spec.labels
    source, weights = _resolve_source(spec.source, folder), _resolve_weights(spec.weights, folder)
    adapter = _resolve(spec.adapter, folder) if spec.adapter else ""
    inputs = spec.inputs and tuple(
        replace(each, example=_resolve(each.example, folder)) if each.example else each for each in spec.inputs
    )
    return replace(spec, source=source, weights=weights, adapter=adapter, labels=labels, inputs=inputs)


def _resolve_allowed(allow: Allow, folder: Path) -> Allowed:
    sources = tuple(_resolve_source(source, folder) for source in allow.sources)
    weights = tuple(_resolve_weights(each, folder) for each in allow.weights)
    labels = tuple(_resolve(each, folder) for each in allow.labels)
    return Allowed(sources, weights, labels, tuple(allow.args), tuple(allow.fields))


def _resolve_source(source: str, folder: Path) -> str:
    kind, _, ident = source.partition(":")
    return f"{kind}:{_resolve(ident, folder)}" if kind in SOURCES and SOURCES[kind].has_path(ident) else source


def _resolve_weights(weights: str, folder: Path) -> str:
    return _resolve(weights, folder) if is_checkpoint(weights) else weights


def _resolve(path: str, folder: Path) -> str:
    """A path from a folder, unless it is absolute; a slash at its end stays."""
    return f"{(folder / path).absolute()}{'/' if path.endswith('/') else ''}"


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
