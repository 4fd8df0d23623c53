"""Build a model from the source that a configuration names; helpers that all sources share."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape, find_nearest, label_failures, suggest
from layertap.models.grammar import SOURCES, WeightsSource, parse_source, parse_weights
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.inputs.noise import check_examples
from layertap.models.inputs.sound import Media, SoundProcessor, make_samples_processor
from layertap.models.labels import Labels, Outputs
from layertap.models.sources.checkpoints import StateDict, read_checkpoint, wrap_errors
from layertap.models.sources.state_dict import LoadReport, load_state_dict, merge_adapter
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec, PreprocessSpec

OF_TORCHVISION = frozenset({"torchvision", "timm", "open_clip"})  # libraries that import it
FLOAT_BITS = 32  # torchvision and timm construct modules in float32
WEIGHTS_HINT = "type DEFAULT, PATH.safetensors, PATH.pth or random:SEED"
DOWNLOAD_HINT = "give a .safetensors path, or random:SEED"
CLASS_TOKENS = frozenset({"class_token", "cls_token", "class_embedding", "distillation_token", "register_tokens"})
Choice = tuple[EmbeddingSpec, str, bool]  # an embedding, the reason for it, and whether it is only a guess
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class BuiltModel:
    """A module with its weights, and its metadata.

    ``module`` is on the CPU, in the configured mode (eval by default), in the dtype it was constructed in, and no
    parameter requires grad.
    """

    module: nn.Module
    inputs: tuple[InputSpec, ...]
    architecture: str  # with ``named`` a library's name for the structure
    weights: str  # for people, without a directory
    media: Media | str = ""  # of pictures, sounds or videos: the preprocessing, or why there is none, if known
    prefix_tokens: int = 0  # class and register tokens before the patches
    named: bool = False  # fingerprints take ``architecture`` and ``settings`` instead of the structure
    settings: str = ""  # that the module tree may not show
    text: TextSpec | None = None  # None if texts can't be sent
    report: LoadReport | None = None  # which tensors of a checkpoint were loaded
    labels: Labels | None = None  # the source's class names; the module may have another number
    embeddings: Sequence[Choice] = ()  # empty: those of its class
    two_towers: bool = False  # its forward takes texts or pictures alone
    outputs: Outputs | None = None  # what its class scores are, if it is known
    code: str = ""  # the imported module of the operator's factory; empty for libraries

    @property
    def preprocess(self) -> Media | None:
        """The preprocessing of pictures, sounds or videos; None if none can be sent."""
        return None if isinstance(self.media, str) else self.media

    @property
    def no_pictures(self) -> str:
        """Why pictures can't be sent."""
        return self.media if isinstance(self.media, str) else ""


# The same as ToTensor for a picture of one channel: there is nothing to choose, so it needs no configuration.
TO_TENSOR = PreprocessSpec(mean=(0.0,), std=(1.0,), channels="gray")


@label_failures("source")
def build_model(spec: ModelSpec) -> BuiltModel:
    """The module that a configuration's entry describes, with its weights.

    Raises LoadError if the source, the architecture, the weights or the preprocessing is unknown or does not fit.
    """
    source, ident = parse_source(spec.source)
    if not source.has_image_options and (spec.interpolate_pos_encoding or spec.image_backend != "auto"):
        hint = "leave them out, or type source: transformers:PATH"
        raise LoadError("image_backend and interpolate_pos_encoding are of transformers' models", hint=hint)
    # Parts of torchvision import each other: a thread that begins with one meets another half-imported unless the whole
    # was imported before, or its import, which another thread has begun, is waited for.
    if source.library in OF_TORCHVISION or "torchvision" in sys.modules:
        import_module("torchvision")
    # The module's name comes from our table, never from a configuration or a request.
    built: BuiltModel = import_module(source.module).build(ident, spec)
    if spec.adapter:
        folder, report = Path(spec.adapter), built.report or LoadReport()
        if not report.adapter:  # else the checkpoint held the adapter, and loading merged it
            merge_adapter(built.module, folder)
        report = replace(report, adapter=folder.name)
        built = replace(built, weights=f"{built.weights} + {folder.name}", report=report)
    built = _apply_configuration(built, spec)
    if any(each.as_list for each in built.inputs):
        if len(built.inputs) > 1:
            raise LoadError(
                "'as_list' is of a model's only input", hint="wrap the model in a module that makes the list"
            )
        built.module.forward = partial(_pass_list, built.module.forward)
        built = replace(built, settings=f"{built.settings}list")
    if spec.constants:
        _bind_constants(built, spec.constants, escape(spec.shown_source))
        built = replace(built, settings=f"{built.settings}constants {describe_arguments(spec.constants)}")
    built.module.cpu().train(spec.mode == "train").requires_grad_(False)
    return built


def _pass_list(forward: Callable[[list[Tensor]], object], rows: Tensor) -> object:
    """Call a forward with a list of the only row; ValueError for several, which it would pad to one size."""
    if len(rows) > 1:
        raise ValueError("lists have one item")
    return forward([*rows])


def _bind_constants(built: BuiltModel, constants: Mapping[str, Any], shown: str) -> None:
    """Let a module's forward get constants by name; LoadError if it does not take one, or it is an input."""
    inputs = {each.name.partition(".")[0] for each in built.inputs}
    known = [name for name in list_parameters(built.module.forward) if name not in inputs]
    refuse_unknown_arguments(constants, known, f"the forward of {shown}")
    built.module.forward = partial(built.module.forward, **constants)


def find_known_embeddings(module: nn.Module, row: Tensor) -> tuple[list[Choice], bool]:
    """Where a module's class has its embedding, most reliable first, and whether its output is class scores.

    None are known unless it is or derives from a known library's class. ``row`` is a batch of one; forwards run on one
    thread.
    """
    libraries = [base.__module__.partition(".")[0] for base in type(module).__mro__]
    modules = {source.library: source.module for source in SOURCES.values() if source.library}
    module_name = next((modules[each] for each in libraries if each in modules), None)
    found: tuple[list[Choice], bool] = ([], False)
    return found if module_name is None else import_module(module_name).find_embeddings(module, row)


def construct_module(
    spec: ModelSpec,
    shown: str,
    construct: Callable[[], Any],
    state: StateDict | None,
    min_bits: int = 0,
    classes: str = "num_classes",
) -> tuple[Any, LoadReport | None]:
    """Construct a module with random weights of the configured seed, or load a state dict into it.

    Tensors that the state dict lacks have the same values each time. ``min_bits`` and ``classes`` are as in
    ``load_state_dict``. LoadError if it can't be constructed, or the state dict does not fit.
    """
    weights = parse_weights(spec.weights)
    seed = 0 if weights.seed is None and not spec.strict else weights.seed
    with wrap_errors(f"{shown} could not be built"), construct_alone(seed):
        module = construct()
    if state is None:
        return module, None
    return module, load_state_dict(
        module, state, weights.label, min_bits, classes=classes, strict=spec.strict, adapter=spec.adapter
    )


def read_weights(spec: ModelSpec) -> StateDict | None:
    """The tensors of the configured checkpoint; None if weights are a seed, or a name."""
    path = parse_weights(spec.weights).path
    return read_checkpoint(path, spec.prefix) if path else None


def refuse_named_weights(weights: WeightsSource, shown: str, hint: str = WEIGHTS_HINT) -> None:
    """LoadError for weights of a name other than DEFAULT."""
    if weights.is_named and weights.label != "DEFAULT":
        raise LoadError(f"{shown} has no weights named {escape(weights.label)}", hint=hint)


@contextmanager
def wrap_download_errors(weights: str, what: str) -> Iterator[None]:
    """Turn any exception while fetching weights into a LoadError that says what to do instead."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        of_network = isinstance(error, OSError) or library in ("httpx", "httpcore", "huggingface_hub", "requests")
        fault = "downloaded" if of_network else "loaded"
        detail = f"weights {escape(weights)} of {what} could not be {fault} ({type(error).__name__})"
        raise LoadError(detail, hint=DOWNLOAD_HINT) from error


def list_parameters(*called: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the keyword parameters of any of these callables."""
    signatures = [inspect.signature(each).parameters.values() for each in called]
    return tuple(dict.fromkeys(each.name for parameters in signatures for each in parameters if each.kind in NAMED))


def refuse_unknown_arguments(args: Mapping[str, Any], known: Collection[str], shown: str) -> None:
    """LoadError if a constructor does not take an argument; the hint lists the nearest known names, or all."""
    for name in args:
        if name not in known:
            hint = suggest(find_nearest(name, known, 3)) or f"it takes {', '.join(known) or 'none'}"
            raise LoadError(f"{shown} takes no argument {escape(name)}", hint=hint)


def refuse_reserved_arguments(args: Mapping[str, Any], reserved: Mapping[str, str], shown: str) -> None:
    """LoadError if another field of the configuration sets an argument; ``reserved`` has the hint for each."""
    for name in args:
        if name in reserved:
            raise LoadError(f"args of {shown} can't have {escape(name)}", hint=reserved[name])


def count_class_tokens(module: nn.Module) -> int:
    """Class, distillation and register tokens, by the names of their parameters."""
    counts: dict[str, int] = {}
    for name, value in module.named_parameters():
        last = name.rpartition(".")[2]
        if last in CLASS_TOKENS:
            counts.setdefault(last, value.shape[-2] if value.ndim > 1 else 1)
    return sum(counts.values())


def describe_arguments(args: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """The arguments, ``without`` some, as text that does not depend on their order; empty if there are none."""
    described = {name: value for name, value in args.items() if name not in without}
    return json.dumps(described, sort_keys=True) if described else ""


def _apply_configuration(built: BuiltModel, spec: ModelSpec) -> BuiltModel:
    """The built model with the configuration's inputs and preprocessing."""
    if spec.inputs is not None:
        check_examples(spec.inputs)
        built = replace(built, inputs=spec.inputs)
    if spec.sound_rate is not None:
        return replace(built, media=_take_samples(built, spec.sound_rate))
    if spec.preprocess == "preset":
        return built
    if spec.preprocess == "none":
        if [(each.dtype, each.shape[:-2], len(each.shape)) for each in built.inputs] == [("float32", (1,), 3)]:
            return replace(built, media=TO_TENSOR)
        return replace(built, media="its entry says preprocess: none")
    return _choose_preprocessing(built, spec.preprocess, fixed=spec.inputs is not None)


def _take_samples(built: BuiltModel, rate: int) -> SoundProcessor:
    """How sounds become rows of a model's samples; LoadError if it has another input."""
    first = built.inputs[0]
    if len(built.inputs) > 1 or len(first.shape) > 2 or first.dtype != "float32":
        detail = "sound_rate is of a model whose only input is float32 samples, and it has another"
        raise LoadError(detail, hint="leave it out, or type inputs: [{name: x, shape: [16000], longest: 480000}]")
    return make_samples_processor(first, rate)


def _choose_preprocessing(built: BuiltModel, wanted: PreprocessSpec, *, fixed: bool) -> BuiltModel:
    index = next((number for number, each in enumerate(built.inputs) if built.two_towers and len(each.shape) == 3), 0)
    picture, size = built.inputs[index], wanted.output_size
    shown = f"input {escape(picture.name)}"
    if len(picture.shape) != 3:
        detail = f"preprocess makes images, and {shown} takes {len(picture.shape)} axes an item"
        raise LoadError(detail, hint="type preprocess: none, and send tensors")
    if picture.shape[0] != wanted.channel_count:
        detail = f"preprocess makes images of {wanted.channel_count} channels, and {shown} takes {picture.shape[0]}"
        raise LoadError(detail, hint="type channels: gray for one, leave it out for three")
    if size is None or picture.shape[1:] == size:
        return replace(built, media=wanted)
    if fixed:
        detail = f"preprocess makes images of {size}, and {shown} is {picture.shape}"
        raise LoadError(detail, hint="make crop and the input's shape equal, or type preprocess: none")
    inputs = list(built.inputs)
    inputs[index] = replace(picture, shape=(picture.shape[0], *size))
    return replace(built, media=wanted, inputs=tuple(inputs))
