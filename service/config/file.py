"""The configuration file: YAML, validated by pydantic, with the line of each mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from layertap.models.check import Address
from layertap.models.errors import Fault, LayertapError, find_nearest
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec, PreprocessSpec, WarmSpec
from layertap.service.config.allowed import Allowed

Mistake = tuple[Address, str]
MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may come again
HINT = "LAYERTAP_CONFIG or --config names it"


class ConfigError(LayertapError):
    """The configuration file can't be read or makes no sense; a line for each mistake.

    The message is for the operator. ``faults`` are safe for any caller: places in the file, no values or paths.
    """


@dataclass(frozen=True)
class Document:
    """What a file holds, and where; ``repeated`` are fields that are there twice."""

    path: Path
    data: object
    root: yaml.Node | None
    repeated: tuple[Mistake, ...] = ()

    def refuse(self, mistakes: Iterable[Mistake]) -> None:
        """ConfigError where there are any mistakes."""
        found = (*self.repeated, *mistakes)
        rows = sorted((self._find_line(place), ".".join(map(str, place)), text) for place, text in found)
        if rows:
            lines = (f"{self.path}:{line}: {': '.join(filter(None, (place, text)))}" for line, place, text in rows)
            places = (Fault(f"line {line}{place and ': '}{place}") for line, place, _ in rows)
            raise ConfigError("\n".join(lines), faults=tuple(places))

    def _find_line(self, place: Address) -> int:
        """The line of a place, or of the part of it that is there."""
        node, line = self.root, 0
        for part in place:
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if pair[0].value == part]
                if not pairs:
                    break
                line, node = pairs[-1][0].start_mark.line, pairs[-1][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
        return line + 1


def read_document(path: Path) -> Document:
    """The file at ``path``; ConfigError where it can't be read, or is no YAML."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return Document(path, None, None)
        repeated = tuple(_find_repeated(root))  # before merges, which repeat fields, are made
        return Document(path, loader.construct_document(root), root, repeated)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", hint=HINT) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        place = Fault(f"line {line}: this is not YAML")
        raise ConfigError(f"{path}:{line}: this is not YAML: {error.problem}", faults=(place,)) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from error


def _find_repeated(root: yaml.Node) -> Iterator[Mistake]:
    """Fields that a mapping has twice, of which YAML takes the last."""
    nodes: list[tuple[Address, yaml.Node]] = [((), root)]
    seen: set[int] = set()  # an anchor may be within itself
    while nodes:
        place, node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += [((*place, number), each) for number, each in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
            yield from (((*place, name), "this is there twice") for name, count in Counter(names).items() if count > 1)
            nodes += [((*place, str(key.value)), value) for key, value in node.value]


strict = with_config(ConfigDict(extra="forbid"))  # of the class, and of what stands in it


@dataclass(frozen=True)
class Defaults:
    """What requests get that do not say."""

    model: str | None = None


@strict
@dataclass(frozen=True)
class ConfigFile:
    """The whole file."""

    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]
    defaults: Defaults = Defaults()
    aliases: dict[str, str] = field(default_factory=dict)
    allow: Allowed | None = None


ADAPTER = TypeAdapter(ConfigFile)
CLASSES: dict[Address, Any] = {
    (): ConfigFile,
    ("defaults",): Defaults,
    ("allow",): Allowed,
    ("models", "*"): ModelSpec,
    ("models", "*", "embedding"): EmbeddingSpec,
    ("models", "*", "preprocess"): PreprocessSpec,
    ("models", "*", "inputs", "*"): InputSpec,
    ("models", "*", "warm", "*"): WarmSpec,
}
# Fields of several types: below them pydantic names the type that it tried.
UNIONS = frozenset({"embedding", "preprocess", "labels", "resize", "crop"})


def read_file(data: object) -> tuple[ConfigFile | None, list[Mistake]]:
    """What a file says; None, and what is wrong with it, where it makes no sense."""
    try:
        return ADAPTER.validate_python(data), []
    except ValidationError as error:
        return None, list(_describe(error))


def _describe(error: ValidationError) -> Iterator[Mistake]:
    """Pydantic's errors, each place once: of those of a union's members the one that goes deepest."""
    messages: dict[Address, str] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = tuple(part for before, part in pairwise(("", *each["loc"])) if before not in UNIONS)
        if place not in messages or each["type"] == "value_error":
            messages[place] = _write_message(each, place)
    for place, text in messages.items():
        if not any(other[: len(place)] == place for other in messages if other != place):
            yield place, text


def _write_message(error: ErrorDetails, place: Address) -> str:
    match error["type"]:
        case "unexpected_keyword_argument":
            kind = CLASSES[tuple("*" if isinstance(part, int) else part for part in place[:-1])]
            [nearest, *_] = find_nearest(str(place[-1]), [each.name for each in fields(kind)], cutoff=0.0)
            return f"there is no such field; the nearest is {nearest!r}"
        case "dataclass_type":
            return "this is no mapping of names to values"
        case "tuple_type":  # which YAML does not have
            return "Input should be a valid list"
        case "value_error":  # of a dataclass of ours, without pydantic's words
            return str(error["ctx"]["error"])
        case _:
            return error["msg"]
