"""The configuration: out of a file, or without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from layertap.models.errors import Fault, RequestError
from layertap.models.sources.grammar import is_checkpoint
from layertap.models.sources.table import SOURCES
from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.checks import check_aliases, check_loading, check_models
from layertap.service.config.document import Mistake, read_document
from layertap.service.config.schema import read_file


@dataclass(frozen=True)
class Configuration:
    """The configured models, the one that a request without ``model`` gets, and the folder that paths begin at.

    ``aliases`` are further names of models; ``allowed`` is what may be brought by HTTP, None where nothing may.
    """

    models: tuple[ModelSpec, ...]
    default: str
    folder: Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    allowed: Allowed | None = None


def read_configuration(path: Path, *, before_loading: bool = False) -> Configuration:
    """The configuration in a file; a relative checkpoint or directory is looked for beside it.

    With ``before_loading`` also what can't be had is refused, as far as it shows without torch: an architecture, a
    device, a file. ConfigError reports all mistakes, each with its line; where fields are wrong, these alone.
    """
    document, folder = read_document(path), path.parent.absolute()
    configuration, mistakes = _parse(document.data, folder)
    if before_loading and configuration is not None:
        mistakes += check_loading(configuration.models, list(mistakes), (folder, Path.cwd()))
    document.refuse(mistakes)
    assert configuration is not None  # noqa: S101  (else there are mistakes)
    return configuration


def parse_entry(data: object, folder: Path) -> ModelSpec:
    """A model as an entry of a file in a folder describes it; RequestError with what is wrong, and where."""
    configuration, mistakes = _parse({"models": [data]}, folder)
    if configuration is None or mistakes:
        raise RequestError.from_faults(
            [Fault(text, pointer="".join(f"/{part}" for part in place[2:])) for place, text in mistakes]
        )
    return configuration.models[0]


def make_default_configuration() -> Configuration:
    """Without a file: the embedded ``digits``, and torchvision's classifiers, loaded when first asked for."""
    from layertap.models.digits import spec
    from layertap.models.sources.build import list_default_architectures

    lazy = (ModelSpec(name=arch, source=f"torchvision:{arch}", load="lazy") for arch in list_default_architectures())
    return Configuration((spec(), *lazy), "digits")


def _parse(data: object, folder: Path) -> tuple[Configuration | None, list[Mistake]]:
    """What a file holds, None where that makes no sense, and what is wrong with it as far as it shows there."""
    file, mistakes = read_file(data)
    if file is None:
        return None, mistakes
    models = tuple(_resolve_paths(spec, folder) for spec in file.models)
    default = file.defaults.model or models[0].name
    mistakes += [*check_models(models, default), *check_aliases(file.aliases, [spec.name for spec in models])]
    allowed = _resolve_allowed(file.allow, folder) if file.allow is not None else None
    return Configuration(models, default, folder, file.aliases, allowed), mistakes


def _resolve_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with relative paths of its source, weights, adapter, labels and examples made absolute."""
    labels = _resolve(spec.labels, folder) if isinstance(spec.labels, str) else spec.labels
    source, weights = _resolve_source(spec.source, folder), _resolve_weights(spec.weights, folder)
    adapter = _resolve(spec.adapter, folder) if spec.adapter else ""
    inputs = spec.inputs and tuple(
        replace(each, example=_resolve(each.example, folder)) if each.example else each for each in spec.inputs
    )
    return replace(spec, source=source, weights=weights, adapter=adapter, labels=labels, inputs=inputs)


def _resolve_allowed(allowed: Allowed, folder: Path) -> Allowed:
    sources = tuple(_resolve_source(each, folder) for each in allowed.sources)
    weights = tuple(_resolve_weights(each, folder) for each in allowed.weights)
    return replace(
        allowed, sources=sources, weights=weights, labels=tuple(_resolve(each, folder) for each in allowed.labels)
    )


def _resolve_source(source: str, folder: Path) -> str:
    kind, _, ident = source.partition(":")
    return f"{kind}:{_resolve(ident, folder)}" if kind in SOURCES and SOURCES[kind].has_path(ident) else source


def _resolve_weights(weights: str, folder: Path) -> str:
    return _resolve(weights, folder) if is_checkpoint(weights) else weights


def _resolve(path: str, folder: Path) -> str:
    """A path from a folder, unless it is absolute; a slash at its end stays."""
    return f"{(folder / path).absolute()}{'/' if path.endswith('/') else ''}"
