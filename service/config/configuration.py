"""The configuration: out of a file, or without one; what is wrong with its entries, what a new one changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from re import fullmatch
from typing import Any

from layertap.models.check import find_mistakes, list_architectures
from layertap.models.errors import Fault, RequestError
from layertap.models.grammar import SOURCES, is_checkpoint
from layertap.models.spec import FOR_TENSORS, ModelSpec, PreprocessSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.file import Mistake, read_document, read_file

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
ALIAS = r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}"  # names of the hub, and tags
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_' and '-', a letter or digit first"
ALIAS_RULE = "an alias has 1 to 200 letters, digits, '.', '_', '-', '/' and ':', a letter or digit first"
NOT_LOADED = frozenset({"load", "required", "idle_timeout_s"})  # fields that the model itself does not depend on


Stamp = tuple[tuple[str | int, ...], ...]  # of files: path, inode, time of the last change in ns, size in bytes


@dataclass(frozen=True)
class Configuration:
    """The configured models, the one that a request without ``model`` gets, and the folder that paths begin at.

    ``aliases`` are further names of models; ``allowed`` is what may be brought by HTTP, None where nothing may.
    ``stamps`` has, by model, the files of its weights as they were when the configuration was read.
    """

    models: tuple[ModelSpec, ...]
    default: str
    folder: Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    allowed: Allowed | None = None
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


def read_configuration(path: Path, *, before_loading: bool = False) -> Configuration:
    """The configuration in a file; a relative checkpoint or directory is looked for beside it.

    With ``before_loading`` also what can't be had is refused, as far as it shows without torch: an architecture, a
    device, a file. ConfigError reports all mistakes, each with its line; where fields are wrong, these alone.
    """
    document, folder = read_document(path), path.parent.absolute()
    configuration, mistakes = _parse(document.data, folder)
    if before_loading and configuration is not None:
        mistakes += _check_loading(configuration.models, list(mistakes), (folder, Path.cwd()))
    document.refuse(mistakes)
    assert configuration is not None  # noqa: S101  (else there are mistakes)
    return replace(configuration, stamps={spec.name: _stamp_weights(spec) for spec in configuration.models})


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

    names = sorted(list_architectures("torchvision", "*.py"))
    lazy = (ModelSpec(name=name, source=f"torchvision:{name}", load="lazy") for name in names)
    return Configuration((spec(), *lazy), "digits")


def _parse(data: object, folder: Path) -> tuple[Configuration | None, list[Mistake]]:
    """What a file holds, None where that makes no sense, and what is wrong with it as far as it shows there."""
    file, mistakes = read_file(data)
    if file is None:
        return None, mistakes
    models = tuple(_resolve_paths(spec, folder) for spec in file.models)
    default = file.defaults.model or models[0].name
    mistakes += [*check_models(models, default), *_check_aliases(file.aliases, [spec.name for spec in models])]
    allowed = file.allow and replace(
        file.allow,
        sources=tuple(_resolve_source(each, folder) for each in file.allow.sources),
        weights=tuple(_resolve_weights(each, folder) for each in file.allow.weights),
        labels=tuple(_resolve(each, folder) for each in file.allow.labels),
    )
    return Configuration(models, default, folder, file.aliases, allowed), mistakes


def _stamp_weights(spec: ModelSpec) -> Stamp:
    """The files of a model's weights: a checkpoint, all files beside an index of shards, all files of a folder.

    For the operator's file only: an entry sent over HTTP may name any path. Empty if they can't be read.
    """
    source = Path(spec.source.partition(":")[2])
    paths = [Path(spec.weights)] if is_checkpoint(spec.weights) else []
    paths = [path.parent if path.suffix == ".json" else path for path in paths]
    paths += [Path(spec.adapter)] if spec.adapter else []
    paths += [source] if source.is_absolute() and source.is_dir() else []
    try:
        files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
        stats = [(str(file), file.stat()) for file in files if file.is_file()]
    except OSError:
        return ()  # loading reports it
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _resolve_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with relative paths of its source, weights, adapter, labels, projections and examples made absolute."""
    labels = _resolve(spec.labels, folder) if isinstance(spec.labels, str) else spec.labels
    source, weights = _resolve_source(spec.source, folder), _resolve_weights(spec.weights, folder)
    adapter = _resolve(spec.adapter, folder) if spec.adapter else ""
    inputs = spec.inputs and tuple(
        replace(each, example=_resolve(each.example, folder)) if each.example else each for each in spec.inputs
    )
    projections = {name: _resolve(path, folder) for name, path in spec.projections.items()}
    spec = replace(spec, source=source, weights=weights, adapter=adapter, labels=labels)
    return replace(spec, inputs=inputs, projections=projections)


def _resolve_source(source: str, folder: Path) -> str:
    kind, _, ident = source.partition(":")
    return f"{kind}:{_resolve(ident, folder)}" if kind in SOURCES and SOURCES[kind].find_path(ident) else source


def _resolve_weights(weights: str, folder: Path) -> str:
    return _resolve(weights, folder) if is_checkpoint(weights) else weights


def _resolve(path: str, folder: Path) -> str:
    """A path from a folder, unless it is absolute; a slash at its end stays."""
    return f"{(folder / path).absolute()}{'/' if path.endswith('/') else ''}"


def check_models(specs: Sequence[ModelSpec], default: str) -> Iterator[Mistake]:
    """What is wrong with entries, as far as the file shows it."""
    names = [spec.name for spec in specs]
    for number, spec in enumerate(specs):
        if not fullmatch(NAME, spec.name):
            yield ("models", number, "name"), NAME_RULE
        elif spec.name in names[:number]:
            yield ("models", number, "name"), f"two models are called {spec.name!r}"
        if ":" not in spec.source:
            text = f"{spec.source!r} has no kind: write KIND:NAME, torchvision:resnet50"
            yield ("models", number, "source"), text
        for name, text in _check_options(spec):
            yield ("models", number, name), f"model {spec.name!r}: {text}"
    if default not in names:
        yield ("defaults", "model"), f"the default model {default!r} is not among {', '.join(names)}"
    yield from _check_tf32(specs)


def _check_aliases(aliases: Mapping[str, str], names: Sequence[str]) -> Iterator[Mistake]:
    """What is wrong with aliases of models, by their names."""
    for alias, target in aliases.items():
        if not fullmatch(ALIAS, alias):
            yield ("aliases", alias), ALIAS_RULE
        elif alias in names:
            yield ("aliases", alias), f"a model is called {alias!r}"
        elif target not in names:
            yield ("aliases", alias), f"there is no model {target!r}"


def _check_loading(
    specs: Sequence[ModelSpec], mistakes: Iterable[Mistake], folders: Sequence[Path]
) -> Iterator[Mistake]:
    """Unavailable architectures, devices and files, found before loading, unless an entry already has a mistake."""
    places = {place for place, _ in mistakes}
    for place, error in find_mistakes(dict(enumerate(specs)), folders):
        if ("models", *place) not in places:
            yield ("models", *place), f"{error.detail}; {error.hint}" if error.hint else error.detail


def _check_options(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Fields of one entry that exclude each other, or ask for what no GPU may do where none may run it."""
    if spec.tf32 and not spec.is_float32:
        yield "tf32", f"tf32 is a way to compute in float32, not in {spec.dtype}"
    if spec.devices and spec.device != "auto":
        yield "device", "give device, or devices, not both"
    options = {"decode: device": spec.decode == "device", "cuda_graphs": any(w.cuda_graphs for w in spec.warm)}
    for option in (option for option, chosen in options.items() if chosen and spec.is_for_cpu):
        yield "device", f"{option} is for models on a GPU, and this one is on the CPU"
    preprocess = spec.preprocess
    if spec.decode == "device" and isinstance(preprocess, PreprocessSpec) and not preprocess.placeable:
        if preprocess.interpolation in FOR_TENSORS:
            yield "decode", "decode: device has no channels, letterbox and scale"
        else:
            known = ", ".join(sorted(FOR_TENSORS))
            yield "decode", f"decode: device resizes by {known}, not by {preprocess.interpolation}"


def _check_tf32(specs: Sequence[ModelSpec]) -> Iterator[Mistake]:
    """Where ``tf32`` could not be kept: torch has one switch for all models of a process."""
    concerned = {n: spec for n, spec in enumerate(specs) if spec.is_float32 and not spec.is_for_cpu}
    others = {number: spec.name for number, spec in concerned.items() if not spec.tf32}
    if 0 < len(others) < len(concerned):
        text = f"tf32 holds for all models in float32 that a GPU may run: set it for {', '.join(others.values())} too"
        yield ("models", next(iter(others))), text


@dataclass(frozen=True)
class Changes:
    """Names of models, of changed ones with the fields; aliases with their new models, None for one that is gone.

    ``default`` is the new one, None where it stays.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str | None]
    default: str | None

    def describe(self) -> dict[str, Any]:
        """As plain data: names only, no values."""
        return asdict(self)

    def needs_loading(self, name: str) -> bool:
        """Whether a changed model has to be loaded anew."""
        return not NOT_LOADED.issuperset(self.changed[name])


def compare(
    specs: Iterable[ModelSpec],
    default: str,
    aliases: Mapping[str, str],
    former: Configuration,
    configuration: Configuration,
) -> Changes:
    """What a configuration changes where these models, this default and these aliases are now.

    A model whose files of weights are not those of the ``former`` configuration has other weights.
    """
    old = {spec.name: spec for spec in specs}
    new = {spec.name: spec for spec in configuration.models}
    names = [each.name for each in fields(ModelSpec)]
    changed = {
        name: tuple(
            each
            for each in names
            if getattr(old[name], each) != getattr(spec, each)
            or (each == "weights" and former.stamps.get(name, ()) != configuration.stamps.get(name, ()))
        )
        for name, spec in new.items()
        if name in old
    }
    return Changes(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed={name: found for name, found in changed.items() if found},
        aliases={
            name: configuration.aliases.get(name)
            for name in {**aliases, **configuration.aliases}
            if aliases.get(name) != configuration.aliases.get(name)
        },
        default=configuration.default if configuration.default != default else None,
    )
