"""What is wrong with entries that each read well: names, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from re import fullmatch

from layertap.models.sources.check import find_mistakes
from layertap.models.spec import FOR_TENSORS, ModelSpec, PreprocessSpec
from layertap.service.config.document import Mistake

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_' and '-', a letter or digit first"


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
        for field, text in _check_options(spec):
            yield ("models", number, field), f"model {spec.name!r}: {text}"
    if default not in names:
        yield ("defaults", "model"), f"the default model {default!r} is not among {', '.join(names)}"
    yield from _check_tf32(specs)


def check_aliases(aliases: Mapping[str, str], names: Sequence[str]) -> Iterator[Mistake]:
    """What is wrong with aliases of models, by their names."""
    for alias, target in aliases.items():
        if not fullmatch(NAME, alias):
            yield ("aliases", alias), NAME_RULE
        elif alias in names:
            yield ("aliases", alias), f"a model is called {alias!r}"
        elif target not in names:
            yield ("aliases", alias), f"there is no model {target!r}"


def check_loading(
    specs: Sequence[ModelSpec], mistakes: Iterable[Mistake], folders: Sequence[Path]
) -> Iterator[Mistake]:
    """What can't be had, or read by those who load it, where there is no mistake in the same place yet."""
    places = {place for place, _ in mistakes}
    for place, error in find_mistakes(dict(enumerate(specs)), folders):
        if ("models", *place) not in places:
            yield ("models", *place), f"{error.detail}; {error.hint}" if error.hint else error.detail


def _check_options(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Fields of one entry that exclude each other, or ask for what no GPU may do where none may run it."""
    if spec.tf32 and spec.dtype != "float32":
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
    concerned = {n: spec for n, spec in enumerate(specs) if spec.dtype == "float32" and not spec.is_for_cpu}
    others = {number: spec.name for number, spec in concerned.items() if not spec.tf32}
    if 0 < len(others) < len(concerned):
        text = f"tf32 holds for all models in float32 that a GPU may run: set it for {', '.join(others.values())} too"
        yield ("models", next(iter(others))), text
