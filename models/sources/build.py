"""Modules built by the source that a configuration names, and what all sources share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from layertap.models.errors import LoadError, escape, find_nearest, label_failures, note_cause, suggest
from layertap.models.inputs.examples import check_examples
from layertap.models.inputs.library_processor import Preprocessing
from layertap.models.inputs.preprocess import compute_output_size
from layertap.models.inputs.text import TextSpec
from layertap.models.labels import Labels
from layertap.models.sources.embeddings import KnownEmbedding
from layertap.models.sources.grammar import WeightsSource
from layertap.models.sources.source_checks import list_classifiers
from layertap.models.sources.table import SOURCES, parse_source
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.models.weights.report import LoadReport


@dataclass(frozen=True)
class BuiltModel:
    """A module with its weights in, and what is known about it.

    ``module`` is on the CPU, in eval mode, in the dtype it was constructed in, and no parameter of it asks for a
    gradient. ``named``: ``architecture`` is a library's name for the structure, which with ``settings`` stands for it
    in fingerprints; otherwise the structure itself does. ``preprocess`` is None where images can't be taken,
    and ``no_pictures`` says why.
    ``prefix_tokens`` counts class and register tokens in front of the patch tokens. ``weights`` is a label for people
    and holds no directory. ``settings`` are those that the module tree may not show, ``text`` is None where text can't
    be taken. ``report`` tells what was taken of a checkpoint. ``labels`` are what the source knows of the classes, for
    as many as the module may not have. ``embedding`` None: what its class says. ``two_towers``: its forward takes texts
    or pictures without the other.
    """

    module: nn.Module
    inputs: tuple[InputSpec, ...]
    preprocess: Preprocessing | None
    architecture: str
    prefix_tokens: int
    weights: str
    named: bool = False
    settings: str = ""
    text: TextSpec | None = None
    report: LoadReport | None = None
    labels: Labels | None = None
    no_pictures: str = ""
    embedding: KnownEmbedding | None = None
    two_towers: bool = False


@label_failures("source")
def build_model(spec: ModelSpec) -> BuiltModel:
    """The module that a configuration's entry describes, with its weights.

    Raises LoadError where the source, the architecture, the weights or the preprocessing can't be had.
    """
    source, ident = parse_source(spec.source)
    if source.module != TRANSFORMERS and (spec.interpolate_pos_encoding or spec.image_backend != "pil"):
        hint = "leave them out, or type source: transformers:PATH"
        raise LoadError("image_backend and interpolate_pos_encoding are of transformers' models", hint=hint)
    # A name of the table: nothing of a configuration, or of a request, is imported here.
    built = import_module(source.module).build(ident, spec)
    if spec.adapter:
        built = _add_adapter(built, Path(spec.adapter))
    built = _apply_configuration(built, spec)
    built.module.cpu().eval().requires_grad_(False)
    return built


def get_seed(spec: ModelSpec, weights: WeightsSource) -> int | None:
    """What a module's construction starts at: tensors that a checkpoint may lack have the same values each time."""
    return 0 if weights.seed is None and not spec.strict else weights.seed


def list_default_architectures() -> list[str]:
    """The image classification architectures of torchvision, sorted: what the default configuration lists."""
    names = list_classifiers()
    if not names:
        # Here: it takes longer to import than torch, and torchvision's files mostly tell.
        from layertap.models.sources import torchvision

        return torchvision.list_classifiers()
    return sorted(names)


@contextmanager
def wrap_build_errors(what: str, note: str = "") -> Iterator[None]:
    """Call a third party's builder inside: whatever it raises becomes a LoadError without its words, and with ours."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        refusal = LoadError(f"{what} could not be built ({type(error).__name__}){note}")
        note_cause(refusal, error)
        raise refusal from error


@contextmanager
def wrap_download_errors(weights: str, what: str) -> Iterator[None]:
    """Fetch weights inside: whatever goes wrong becomes a LoadError that says what to do instead."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        fault = "downloaded" if _is_network_error(error) else "loaded"
        detail = f"weights {escape(weights)} of {what} could not be {fault} ({type(error).__name__})"
        raise LoadError(detail, hint=WEIGHTS_HINT) from error


def _add_adapter(built: BuiltModel, folder: Path) -> BuiltModel:
    """The model with an adapter merged into its weights, unless it was among them in the checkpoint."""
    from layertap.models.weights.adapters import merge_adapter

    report = built.report or LoadReport()
    if not report.adapter:
        merge_adapter(built.module, folder)
    weights = f"{built.weights} + {folder.name}"
    return replace(built, weights=weights, report=replace(report, adapter=folder.name))


def _apply_configuration(built: BuiltModel, spec: ModelSpec) -> BuiltModel:
    """The source's answer, overridden by what the configuration says about inputs and preprocessing."""
    if spec.inputs is not None:
        check_examples(spec.inputs)
        built = replace(built, inputs=spec.inputs)
    if spec.preprocess == "preset":
        return built
    if spec.preprocess == "none":
        return replace(built, preprocess=None, no_pictures="its entry says preprocess: none")
    return _choose_preprocessing(built, spec.preprocess, fixed=spec.inputs is not None)


def _choose_preprocessing(built: BuiltModel, wanted: PreprocessSpec, *, fixed: bool) -> BuiltModel:
    index = next((number for number, each in enumerate(built.inputs) if built.two_towers and len(each.shape) == 3), 0)
    first, size = built.inputs[index], compute_output_size(wanted)
    if len(first.shape) != 3:
        detail = f"preprocess makes images, and input {escape(first.name)} takes {len(first.shape)} axes an item"
        raise LoadError(detail, hint="type preprocess: none, and send tensors")
    if first.shape[0] != wanted.channel_count:
        detail = f"preprocess makes images of {wanted.channel_count} channels, and input {escape(first.name)} takes "
        raise LoadError(f"{detail}{first.shape[0]}", hint="type channels: gray for one, leave it out for three")
    if size is None or first.shape[1:] == size:
        return replace(built, preprocess=wanted)
    if fixed:
        detail = f"preprocess makes images of {size}, and input {escape(first.name)} is {first.shape}"
        raise LoadError(detail, hint="make crop and the input's shape equal, or type preprocess: none")
    follows = replace(first, shape=(first.shape[0], *size))
    return replace(built, preprocess=wanted, inputs=(*built.inputs[:index], follows, *built.inputs[index + 1 :]))


def _is_network_error(error: Exception) -> bool:
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or library in ("httpx", "httpcore", "huggingface_hub", "requests", "urllib3")


TRANSFORMERS = SOURCES["transformers"].module
FLOAT_BITS = 32  # of the floating numbers of a module as torchvision and timm construct it
WEIGHTS_HINT = "give a .safetensors path, or random:SEED"


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def list_parameters(*called: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what can be given by name to any of these."""
    signatures = [inspect.signature(each).parameters.values() for each in called]
    return tuple(dict.fromkeys(each.name for parameters in signatures for each in parameters if each.kind in NAMED))


def refuse_unknown_arguments(args: Mapping[str, Any], known: Collection[str], shown: str) -> None:
    """LoadError where a constructor does not take an argument, with the nearest names that it takes, or all."""
    for name in args:
        if name not in known:
            hint = suggest(find_nearest(name, known, 3)) or f"it takes {', '.join(known) or 'none'}"
            raise LoadError(f"{shown} takes no argument {escape(name)}", hint=hint)


def refuse_reserved_arguments(args: Mapping[str, Any], reserved: Mapping[str, str], shown: str) -> None:
    """LoadError where another field of the configuration decides an argument; ``reserved`` says what to type."""
    for name in args:
        if name in reserved:
            raise LoadError(f"args of {shown} can't have {escape(name)}", hint=reserved[name])


def describe_arguments(args: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """The arguments ``without`` some as text, the same in any order; empty where there are none."""
    described = {name: value for name, value in args.items() if name not in without}
    return json.dumps(described, sort_keys=True) if described else ""
