"""The configuration file: which models there are. YAML, of which JSON is a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from layertap.models.errors import LayertapError
from layertap.models.spec import DIRECTORIES, FOR_TENSORS, ModelSpec, PreprocessSpec

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class ConfigError(LayertapError):
    """The configuration file can't be read or makes no sense."""


@dataclass(frozen=True)
class Configuration:
    """The configured models and the one that a request without ``model`` gets."""

    models: tuple[ModelSpec, ...]
    default: str


class _Defaults(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: Annotated[list[dict[str, Any]], Field(min_length=1)]
    defaults: _Defaults = _Defaults()


class _Named(BaseModel):
    name: Annotated[str, Field(pattern=NAME)]


_SPEC = TypeAdapter(with_config(ConfigDict(extra="forbid"))(ModelSpec))


def read(path: Path) -> Configuration:
    """The configuration in a file; a relative checkpoint or directory is looked for beside it.

    ConfigError says what is wrong.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        return _configuration(data, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.detail}") from error


def embedded() -> Configuration:
    """Without a file: the embedded ``digits``, and torchvision's classifiers, loaded when first asked for."""
    from layertap.models.digits import spec
    from layertap.models.sources import listed_architectures

    listed = (ModelSpec(name=arch, source=f"torchvision:{arch}", load="lazy") for arch in listed_architectures())
    return Configuration((spec(), *listed), "digits")


def _configuration(data: object, folder: Path) -> Configuration:
    with _valid():
        file = _File.model_validate(data)
    names: list[str] = []
    specs: list[ModelSpec] = []
    for place, entry in enumerate(file.models):
        with _valid("models", place):
            names.append(_Named.model_validate(entry).name)
            specs.append(_beside(_SPEC.validate_python(entry), folder))
        if ":" not in specs[-1].source:
            raise ConfigError(
                f"models.{place}.source: {specs[-1].source!r} has no kind: write KIND:NAME, torchvision:resnet50"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}")
    _check_precision(specs)
    _check_devices(specs)
    default = file.defaults.model or names[0]
    if default not in names:
        raise ConfigError(f"the default model {default!r} is not among {', '.join(names)}")
    return Configuration(tuple(specs), default)


def _check_precision(specs: Sequence[ModelSpec]) -> None:
    """ConfigError where ``tf32`` could not be kept: torch has one switch for all models of a process."""
    low = next((spec for spec in specs if spec.tf32 and spec.dtype != "float32"), None)
    if low is not None:
        raise ConfigError(f"model {low.name!r}: tf32 is a way to compute in float32, not in {low.dtype}")
    placed = [spec for spec in specs if spec.dtype == "float32" and spec.device != "cpu"]
    if len({spec.tf32 for spec in placed}) > 1:
        others = ", ".join(spec.name for spec in placed if not spec.tf32)
        raise ConfigError(f"tf32 holds for all models in float32 that a GPU may run: set it for {others} too")


def _check_devices(specs: Sequence[ModelSpec]) -> None:
    """ConfigError where a model asks for what only a GPU does, and none may run it or none can do it so."""
    for spec in specs:
        wanted = {"decode: device": spec.decode == "device", "cuda_graphs": any(w.cuda_graphs for w in spec.warm)}
        for name in (name for name, asked in wanted.items() if asked and spec.device == "cpu"):
            raise ConfigError(f"model {spec.name!r}: {name} is for models on a GPU, and this one is on the CPU")
        how = spec.preprocess
        if spec.decode == "device" and isinstance(how, PreprocessSpec) and not how.placeable:
            known = ", ".join(sorted(FOR_TENSORS))
            raise ConfigError(f"model {spec.name!r}: decode: device resizes by {known}, not by {how.interpolation}")


def _beside(spec: ModelSpec, folder: Path) -> ModelSpec:
    kind, _, ident = spec.source.partition(":")
    if kind in DIRECTORIES and ident:
        spec = replace(spec, source=f"{kind}:{folder / ident}")  # an absolute one stays as it is
    if Path(spec.weights).suffix and not spec.weights.startswith("random:") and not Path(spec.weights).is_absolute():
        beside = folder / spec.weights
        return replace(spec, weights=str(beside)) if beside.suffix in (".safetensors", ".pth", ".pt") else spec
    return spec


@contextmanager
def _valid(*place: str | int) -> Iterator[None]:
    """Turn pydantic's complaints about what stands at a place of the file into a ConfigError."""
    try:
        yield
    except ValidationError as error:
        # Of the complaints of a union's members, that of the member which fits best goes deepest, or is our own.
        found = max(
            error.errors(include_url=False, include_input=False), key=lambda each: (len(each["loc"]), _own(each))
        )
        names = [str(part) for part in (*place, *found["loc"]) if not str(part).startswith(MEMBERS)]
        message = _own(found) or MESSAGES.get(found["type"], found["msg"])
        raise ConfigError(": ".join(part for part in (".".join(names), message) if part)) from error


def _own(found: ErrorDetails) -> str:
    """What a dataclass of ours says, without pydantic's words."""
    return str(found["ctx"]["error"]) if found["type"] == "value_error" else ""


MEMBERS = ("literal[", "PreprocessSpec", "tuple[")  # pydantic's own names for members of a union
MESSAGES = {
    "model_type": "this is no mapping of names to values",
    "unexpected_keyword_argument": "there is no such field",
    "extra_forbidden": "there is no such field",
}
