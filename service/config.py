"""The configuration file: which models there are. YAML, of which JSON is a part."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from layertap.models.errors import LayertapError
from layertap.models.sources.check import Place, find_mistakes
from layertap.models.spec import DIRECTORIES, FOR_TENSORS, InputSpec, ModelSpec, PreprocessSpec, WarmSpec

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_' and '-', a letter or digit first"
CONFIG_HINT = "LAYERTAP_CONFIG or --config names it"
Mistake = tuple[Place, str]


class ConfigError(LayertapError):
    """The configuration file can't be read or makes no sense; a line for each mistake."""


@dataclass(frozen=True)
class Configuration:
    """The configured models, the one that a request without ``model`` gets, and the folder that paths begin at."""

    models: tuple[ModelSpec, ...]
    default: str
    folder: Path | None = None


class _Defaults(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None


with_config(ConfigDict(extra="forbid"))(ModelSpec)  # marks the class, and so what stands in it
ENTRY = TypeAdapter(ModelSpec)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: Annotated[list[ModelSpec], Field(min_length=1)]
    defaults: _Defaults = _Defaults()


def read(path: Path) -> Configuration:
    """The configuration in a file; a relative checkpoint or directory is looked for beside it.

    ConfigError says what is wrong, each mistake with its line.
    """
    document = _document(path)
    parsed = _parse(document)
    document.refuse(parsed.mistakes)
    return parsed.configuration(path)


def load(path: Path) -> Configuration:
    """The configuration in a file for a server to start with: whatever shows to be wrong without torch is refused.

    ConfigError, as ``read`` raises it, also for what can't be had: an architecture, a device, a file.
    """
    document = _document(path)
    parsed = _parse(document)
    document.refuse([*parsed.mistakes, *_check_loading(parsed, (path.parent.absolute(), Path.cwd()))])
    return parsed.configuration(path)


def embedded() -> Configuration:
    """Without a file: the embedded ``digits``, and torchvision's classifiers, loaded when first asked for."""
    from layertap.models.digits import spec
    from layertap.models.sources.build import list_default_architectures

    listed = (ModelSpec(name=arch, source=f"torchvision:{arch}", load="lazy") for arch in list_default_architectures())
    return Configuration((spec(), *listed), "digits")


@dataclass(frozen=True)
class _Document:
    """What a file holds, and where."""

    path: Path
    data: object
    root: yaml.Node | None

    def refuse(self, found: Iterable[Mistake]) -> None:
        """ConfigError where there are any mistakes."""
        lines = sorted((self._line(place), ".".join(map(str, place)), text) for place, text in found)
        if lines:
            told = (f"{self.path}:{line}: {': '.join(filter(None, (place, text)))}" for line, place, text in lines)
            raise ConfigError("\n".join(told))

    def _line(self, place: Place) -> int:
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


def _document(path: Path) -> _Document:
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", hint=CONFIG_HINT) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from error
    try:
        root = loader.get_single_node()
        return _Document(path, None if root is None else loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: this is not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from error
    finally:
        loader.dispose()


@dataclass(frozen=True)
class _Parsed:
    """What a file says and what is wrong with it: entries by number, of refused ones what is left without that."""

    specs: dict[int, ModelSpec]
    default: str
    mistakes: list[Mistake]

    def configuration(self, path: Path) -> Configuration:
        """The configuration of a file without mistakes."""
        return Configuration(tuple(self.specs.values()), self.default, path.parent.absolute())


def _parse(document: _Document) -> _Parsed:
    """What shows in the file alone; one mistake hides no other."""
    default, mistakes = _default(document.data), list[Mistake]()
    refused: dict[object, set[object]] = {}
    try:
        default = _File.model_validate(document.data).defaults.model
    except ValidationError as error:
        mistakes += _describe(error)
        refused = _refused(error)
    specs, names = {}, list[str | None]()
    for number, entry in enumerate(_entries(document.data)):
        spec = _spec(entry, refused.get(number, set()))
        if spec is not None:
            specs[number] = _beside(spec, document.path.parent)
        names.append(_text(entry, "name") if spec is None or number in refused else spec.name)
    default = default or next(iter(names), None) or ""
    whole = {number: spec for number, spec in specs.items() if number not in refused}
    mistakes += [*_check_names(names, default), *_check_kinds(specs), *_check_precision(whole), *_check_devices(whole)]
    return _Parsed(specs, default, mistakes)


def _refused(error: ValidationError) -> dict[object, set[object]]:
    """The fields that are refused, by the entry's number."""
    refused: dict[object, set[object]] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = each["loc"]
        if len(place) > 1 and place[0] == "models":
            refused.setdefault(place[1], set()).update(place[2:3])
    return refused


def _entries(data: object) -> list[object]:
    entries = data.get("models") if isinstance(data, dict) else None
    return entries if isinstance(entries, list) else []


def _default(data: object) -> str | None:
    return _text(data.get("defaults"), "model") if isinstance(data, dict) else None


def _text(data: object, name: str) -> str | None:
    """A text in what may be a mapping; None where there is none."""
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _spec(entry: object, refused: set[object]) -> ModelSpec | None:
    """An entry without the fields that are refused, so that the others are looked at too; None where that is none."""
    if not isinstance(entry, dict):
        return None
    left = {name: value for name, value in entry.items() if name not in refused}
    try:
        return ENTRY.validate_python({"name": "", **left} if refused else left)
    except ValidationError:
        return None


def _check_loading(parsed: _Parsed, folders: Sequence[Path]) -> Iterator[Mistake]:
    """What can't be had, or read by those who load it, where nothing is told of the same place yet."""
    told = {place for place, _ in parsed.mistakes}
    numbers = list(parsed.specs)
    for (at, *rest), error in find_mistakes(list(parsed.specs.values()), folders):
        place = ("models", numbers[int(at)], *rest)
        if place not in told:
            yield place, _in_one_line(error)


def _check_names(names: Sequence[str | None], default: str) -> Iterator[Mistake]:
    """Names of entries; None is one that is refused already, and may have been meant to be any."""
    for number, name in enumerate(names):
        if name is not None and not fullmatch(NAME, name):
            yield ("models", number, "name"), NAME_RULE
        elif name is not None and name in names[:number]:
            yield ("models", number, "name"), f"two models are called {name!r}"
    known = [name for name in names if name is not None]
    if names and len(known) == len(names) and default not in known:
        yield ("defaults", "model"), f"the default model {default!r} is not among {', '.join(known)}"


def _check_kinds(specs: Mapping[int, ModelSpec]) -> Iterator[Mistake]:
    for number, spec in specs.items():
        if ":" not in spec.source:
            text = f"{spec.source!r} has no kind: write KIND:NAME, torchvision:resnet50"
            yield ("models", number, "source"), text


def _check_precision(specs: Mapping[int, ModelSpec]) -> Iterator[Mistake]:
    """Where ``tf32`` could not be kept: torch has one switch for all models of a process."""
    for number, spec in specs.items():
        if spec.tf32 and spec.dtype != "float32":
            text = f"model {spec.name!r}: tf32 is a way to compute in float32, not in {spec.dtype}"
            yield ("models", number, "tf32"), text
    placed = [(number, spec) for number, spec in specs.items() if spec.dtype == "float32" and spec.device != "cpu"]
    if len({spec.tf32 for _, spec in placed}) > 1:
        others = [(number, spec.name) for number, spec in placed if not spec.tf32]
        names = ", ".join(name for _, name in others)
        text = f"tf32 holds for all models in float32 that a GPU may run: set it for {names} too"
        yield ("models", others[0][0]), text


def _check_devices(specs: Mapping[int, ModelSpec]) -> Iterator[Mistake]:
    """Where a model asks for what only a GPU does, and none may run it or none can do it so."""
    for number, spec in specs.items():
        wanted = {"decode: device": spec.decode == "device", "cuda_graphs": any(w.cuda_graphs for w in spec.warm)}
        for name in (name for name, asked in wanted.items() if asked and spec.device == "cpu"):
            text = f"model {spec.name!r}: {name} is for models on a GPU, and this one is on the CPU"
            yield ("models", number, "device"), text
        how = spec.preprocess
        if spec.decode == "device" and isinstance(how, PreprocessSpec) and not how.placeable:
            known = ", ".join(sorted(FOR_TENSORS))
            text = f"model {spec.name!r}: decode: device resizes by {known}, not by {how.interpolation}"
            yield ("models", number, "decode"), text


def _beside(spec: ModelSpec, folder: Path) -> ModelSpec:
    kind, _, ident = spec.source.partition(":")
    if kind in DIRECTORIES and ident:
        spec = replace(spec, source=f"{kind}:{folder / ident}")  # an absolute one stays as it is
    if Path(spec.weights).suffix and not spec.weights.startswith("random:") and not Path(spec.weights).is_absolute():
        beside = folder / spec.weights
        return replace(spec, weights=str(beside)) if beside.suffix in (".safetensors", ".pth", ".pt") else spec
    return spec


def _describe(error: ValidationError) -> Iterator[Mistake]:
    """Pydantic's complaints, each place once: of those of a union's members the one that goes deepest."""
    found: dict[Place, str] = {}
    for each in error.errors(include_url=False, include_input=False):
        place = tuple(part for part in each["loc"] if not _is_member(part))
        if place not in found or _own(each):
            found[place] = _message(each, place)
    for place, text in found.items():
        if not any(other[: len(place)] == place for other in found if other != place):
            yield place, text


def _is_member(part: str | int) -> bool:
    return part == "int" or str(part).startswith(MEMBERS)


def _message(found: ErrorDetails, place: Place) -> str:
    if found["type"] in UNKNOWN:
        return f"there is no such field; the nearest is {_nearest(str(place[-1]), place[:-1])!r}"
    return _own(found) or MESSAGES.get(found["type"], found["msg"])


def _nearest(name: str, parent: Place) -> str:
    known = FIELDS[tuple("*" if isinstance(part, int) else part for part in parent)]
    return difflib.get_close_matches(name[:100], known, n=1, cutoff=0.0)[0]


def _own(found: ErrorDetails) -> str:
    """What a dataclass of ours says, without pydantic's words."""
    return str(found["ctx"]["error"]) if found["type"] == "value_error" else ""


def _in_one_line(error: LayertapError) -> str:
    return f"{error.detail}; {error.hint}" if error.hint else error.detail


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


MEMBERS = ("literal[", "PreprocessSpec", "tuple[")  # pydantic's own names for members of a union
UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
MESSAGES = {
    "model_type": "this is no mapping of names to values",
    "dataclass_type": "this is no mapping of names to values",
}
FIELDS: dict[Place, list[str]] = {
    (): list(_File.model_fields),
    ("defaults",): list(_Defaults.model_fields),
    ("models", "*"): _fields(ModelSpec),
    ("models", "*", "preprocess"): _fields(PreprocessSpec),
    ("models", "*", "inputs", "*"): _fields(InputSpec),
    ("models", "*", "warm", "*"): _fields(WarmSpec),
}
