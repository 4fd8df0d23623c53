"""The configuration file: which models there are. YAML, of which JSON is a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from models.errors import LayertapError
from models.spec import ModelSpec

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
    """The configuration in a file; a relative checkpoint is looked for beside it. ConfigError says what is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        file = _File.model_validate(data)
        specs = tuple(_spec(entry, path.parent) for entry in file.models)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from error
    names = [spec.name for spec in specs]
    default = file.defaults.model or names[0]
    if default not in names:
        raise ConfigError(f"{path}: the default model {default!r} is not among {', '.join(names)}")
    return Configuration(specs, default)


def embedded() -> Configuration:
    """Without a file: the embedded ``digits``, and torchvision's classifiers, loaded when first asked for."""
    from models.digits import spec
    from models.sources import listed_architectures

    listed = (ModelSpec(name=arch, source=f"torchvision:{arch}", load="lazy") for arch in listed_architectures())
    return Configuration((spec(), *listed), "digits")


def _spec(entry: dict[str, Any], folder: Path) -> ModelSpec:
    _Named.model_validate(entry)
    spec = _SPEC.validate_python(entry)
    if Path(spec.weights).suffix and not spec.weights.startswith("random:") and not Path(spec.weights).is_absolute():
        beside = folder / spec.weights
        return replace(spec, weights=str(beside)) if beside.suffix in (".safetensors", ".pth", ".pt") else spec
    return spec


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
