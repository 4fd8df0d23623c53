"""What is wrong with specs that each read well: names, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from re import fullmatch

from layertap.models.errors import LayertapError
from layertap.models.sources.check import find_mistakes
from layertap.models.spec import FOR_TENSORS, ModelSpec, PreprocessSpec
from layertap.service.config.document import Mistake

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_' and '-', a letter or digit first"

Specs = Mapping[int, ModelSpec]


def check_specs(
    specs: Specs, refused: Collection[object], names: Sequence[str | None], default: str
) -> Iterator[Mistake]:
    """What is wrong with specs, by the entry's number, as far as the file shows it.

    Those that are ``refused`` already lack fields. Of ``names``, None is one that may have been meant to be any.
    """
    complete = {number: spec for number, spec in specs.items() if number not in refused}
    yield from _check_names(names, default)
    yield from _check_sources(specs)
    yield from _check_precision(complete)
    yield from _check_devices(complete)


def check_aliases(aliases: Mapping[str, str], names: Sequence[str | None]) -> Iterator[Mistake]:
    """What is wrong with aliases of models, by their names."""
    for alias, target in aliases.items():
        if not fullmatch(NAME, alias):
            yield ("aliases", alias), NAME_RULE
        elif alias in names:
            yield ("aliases", alias), f"a model is called {alias!r}"
        elif target not in names and None not in names:
            yield ("aliases", alias), f"there is no model {target!r}"


def check_loading(specs: Specs, mistakes: Iterable[Mistake], folders: Sequence[Path]) -> Iterator[Mistake]:
    """What can't be had, or read by those who load it, where there is no mistake in the same place yet."""
    places = {place for place, _ in mistakes}
    numbers = list(specs)
    for (index, *rest), error in find_mistakes(list(specs.values()), folders):
        place = ("models", numbers[int(index)], *rest)
        if place not in places:
            yield place, _format_error(error)


def _check_names(names: Sequence[str | None], default: str) -> Iterator[Mistake]:
    for number, name in enumerate(names):
        if name is not None and not fullmatch(NAME, name):
            yield ("models", number, "name"), NAME_RULE
        elif name is not None and name in names[:number]:
            yield ("models", number, "name"), f"two models are called {name!r}"
    known = [name for name in names if name is not None]
    if names and len(known) == len(names) and default not in known:
        yield ("defaults", "model"), f"the default model {default!r} is not among {', '.join(known)}"


def _check_sources(specs: Specs) -> Iterator[Mistake]:
    for number, spec in specs.items():
        if ":" not in spec.source:
            text = f"{spec.source!r} has no kind: write KIND:NAME, torchvision:resnet50"
            yield ("models", number, "source"), text


def _check_precision(specs: Specs) -> Iterator[Mistake]:
    """Where ``tf32`` could not be kept: torch has one switch for all models of a process."""
    for number, spec in specs.items():
        if spec.tf32 and spec.dtype != "float32":
            text = f"model {spec.name!r}: tf32 is a way to compute in float32, not in {spec.dtype}"
            yield ("models", number, "tf32"), text
    concerned = {number: spec for number, spec in specs.items() if spec.dtype == "float32" and not spec.is_for_cpu}
    if len({spec.tf32 for spec in concerned.values()}) > 1:
        others = {number: spec.name for number, spec in concerned.items() if not spec.tf32}
        text = f"tf32 holds for all models in float32 that a GPU may run: set it for {', '.join(others.values())} too"
        yield ("models", next(iter(others))), text


def _check_devices(specs: Specs) -> Iterator[Mistake]:
    """Where a model asks for what only a GPU does, and none may run it or none can do it so."""
    for number, spec in specs.items():
        if spec.devices and spec.device != "auto":
            yield ("models", number, "device"), f"model {spec.name!r}: give device, or devices, not both"
        options = {"decode: device": spec.decode == "device", "cuda_graphs": any(w.cuda_graphs for w in spec.warm)}
        for name in (name for name, chosen in options.items() if chosen and spec.is_for_cpu):
            text = f"model {spec.name!r}: {name} is for models on a GPU, and this one is on the CPU"
            yield ("models", number, "device"), text
        preprocess = spec.preprocess
        if spec.decode == "device" and isinstance(preprocess, PreprocessSpec) and not preprocess.placeable:
            known = ", ".join(sorted(FOR_TENSORS))
            text = f"model {spec.name!r}: decode: device resizes by {known}, not by {preprocess.interpolation}"
            if preprocess.interpolation in FOR_TENSORS:
                text = f"model {spec.name!r}: decode: device has no channels, letterbox and scale"
            yield ("models", number, "decode"), text


def _format_error(error: LayertapError) -> str:
    return f"{error.detail}; {error.hint}" if error.hint else error.detail
