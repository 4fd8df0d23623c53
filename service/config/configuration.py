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
from layertap.service.config.checks import Entry, check_aliases, check_entries, check_loading
from layertap.service.config.document import Mistake, read_document
from layertap.service.config.schema import ConfigFile, read


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
    device, a file. ConfigError reports all mistakes, each with its line.
    """
    document, folder = read_document(path), path.parent.absolute()
    configuration, entries, mistakes = _parse(document.data, folder)
    if before_loading:
        mistakes += check_loading(entries, list(mistakes), (folder, Path.cwd()))
    document.refuse(mistakes)
    return configuration


def parse_entry(data: object, folder: Path) -> ModelSpec:
    """A model as an entry of a file in a folder describes it; RequestError with what is wrong, and where."""
    configuration, _, mistakes = _parse({"models": [data]}, folder)
    if mistakes:
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


def _parse(data: object, folder: Path) -> tuple[Configuration, list[Entry], list[Mistake]]:
    """What a file holds, and what is wrong with it as far as it shows there: one mistake hides no other."""
    found, mistakes = read(ConfigFile, data, (), {})
    file = found or ConfigFile(models=[])
    entries: list[Entry] = []
    for number, each in enumerate(file.models):
        read_spec, wrong = read(ModelSpec, each, ("models", number), {"name": ""})
        spec = _resolve_paths(read_spec, folder) if read_spec is not None else None
        name = _get_text(each, "name") if wrong or spec is None else spec.name
        entries.append(Entry(name, spec, not wrong))
        mistakes += wrong
    names = [entry.name for entry in entries]
    defaults = data.get("defaults") if isinstance(data, dict) else None  # other fields of it may be refused
    default = _get_text(defaults, "model") or next(iter(names), None) or ""
    mistakes += [*check_entries(entries, default), *check_aliases(file.aliases, names)]
    models = tuple(entry.spec for entry in entries if entry.spec is not None)
    allowed = _resolve_allowed(file.allow, folder) if file.allow is not None else None
    return Configuration(models, default, folder, file.aliases, allowed), entries, mistakes


def _get_text(data: object, name: str) -> str | None:
    """A text in what may be a mapping; None where there is none."""
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


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
