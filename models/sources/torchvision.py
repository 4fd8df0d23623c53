"""Modules from torchvision: image classification, semantic segmentation and video classification."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision.models import VisionTransformer, get_model, get_model_builder, get_model_weights, list_models
from torchvision.models.video import MViT

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.grammar import parse_weights, unknown_name_error
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.inputs.presets import choose_preprocessing, from_torchvision
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    FLOAT_BITS,
    BuiltModel,
    construct_module,
    describe_arguments,
    list_parameters,
    read_weights,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
    wrap_download_errors,
)
from layertap.models.sources.checkpoints import StateDict
from layertap.models.spec import InputSpec, ModelSpec

FRAMES = 16
POSITIONS, PATCHES = "encoder.pos_embedding", "conv_proj.weight"
QUANTIZED = "quantized_"
RESERVED = dict.fromkeys(
    ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress"), "type weights: beside args:"
)
OF_CONSTRUCTION = frozenset({"weights_backbone", "init_weights"})  # no effect once other weights are loaded
OLD_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
REFUSED = {
    "ObjectDetection": "detection takes a list of images with their boxes, not a batch",
    "OpticalFlow": "optical flow takes two images an item",
}
State = Mapping[str, Tensor] | None


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The torchvision model ``ARCH``, the same as ``get_model`` returns for the same weights.

    Without released weights it is ``get_model(ARCH, weights=None)``; a file with the name of released weights counts
    as these. LoadError if the model or weights are unknown, not offered, or can't be read or downloaded.
    """
    shown, kind = f"torchvision:{ident}", _find_kind(ident)
    released = _find_released(ident, spec)
    state = _read_state(ident, released, spec)
    create = partial(construct, ident, state, spec.args, released)
    module, report = construct_module(spec, shown, create, state, FLOAT_BITS)
    weights = parse_weights(spec.weights)
    entry = released or get_model_weights(ident).__members__["DEFAULT"]
    transforms = entry.transforms()
    shape = _fit_image_size(module, SHAPES[kind](transforms, entry.meta), transforms)
    name = next(iter(inspect.signature(module.forward).parameters))
    options = _make_options(ident, kind, state, released)
    no_pictures = f"torchvision's {kind} takes no single pictures"
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, shape),),
        architecture=shown,
        weights=f"{type(released).__name__}.{released.name}" if released and weights.is_named else weights.label,
        pictures=read_transforms(transforms) if len(shape) == 3 else no_pictures,
        prefix_tokens=int(isinstance(module, VisionTransformer | MViT)),
        named=True,
        settings=describe_arguments({**options, **spec.args}, without=OF_CONSTRUCTION),
        report=report,
        labels=Labels(tuple(released.meta.get("categories", ())), "weights") if released is not None else None,
    )


def list_classifiers() -> list[str]:
    """Architectures for image classification, sorted, without quantised ones."""
    return [name for name in list_offered() if _get_preset_name(name) == "ImageClassification"]


def _find_kind(ident: str) -> str:
    """The class name of the architecture's preset, which tells the kind of input."""
    if ident not in list_models():
        raise unknown_name_error("torchvision", ident, list_offered())
    if ident.startswith(QUANTIZED):
        hint = f"type torchvision:{ident.removeprefix(QUANTIZED)}"
        raise LoadError(f"torchvision:{ident} is not offered: it is made for int8 arithmetic", hint=hint)
    kind = _get_preset_name(ident)
    if kind not in SHAPES:
        raise LoadError(f"torchvision:{ident} is not offered: {REFUSED.get(kind, 'what it takes is not known')}")
    return kind


def list_offered() -> list[str]:
    """All architectures that can be served, sorted."""
    return [name for name in list_models() if not name.startswith(QUANTIZED) and _get_preset_name(name) in SHAPES]


def _get_preset_name(name: str) -> str:
    return type(get_model_weights(name).__members__["DEFAULT"].transforms()).__name__


def _find_released(ident: str, spec: ModelSpec) -> Any | None:
    """The configured weights among those that torchvision publishes, by their name or their file's name."""
    weights, members = parse_weights(spec.weights), get_model_weights(ident).__members__
    if weights.path is not None:
        return next((each for each in members.values() if each.url.rpartition("/")[2] == weights.path.name), None)
    if not weights.is_named:
        return None
    prefix, name = type(members["DEFAULT"]).__name__ + ".", weights.label
    if (member := members.get(name.removeprefix(prefix))) is not None:
        return member
    names = ", ".join(members)
    hint = suggest(find_nearest(name, members)) or f"type one of {names}"
    raise LoadError(f"torchvision:{ident} has weights {names}, and none named {escape(name)}", hint=hint)


def _read_state(ident: str, released: Any | None, spec: ModelSpec) -> StateDict | None:
    """The tensors of a file or of released weights; some are renamed or dropped as in torchvision's builders."""
    state = read_weights(spec)
    if state is None and released is not None:
        # The builders' own download would unpickle any file in torch's cache; this one reads tensors only.
        with wrap_download_errors(spec.weights, f"torchvision:{ident}"):
            options = {"progress": False, "check_hash": True, "map_location": "cpu", "weights_only": True}
            state = StateDict(released.get_state_dict(**options))
    if state is None:
        return None
    if ident == "googlenet" and released is not None:  # torchvision drops these heads after loading
        for name in [name for name in state if name.startswith(("aux1.", "aux2."))]:
            del state[name]
    if ident.startswith("densenet"):  # its files are older than torch's ban on dots in module names
        for name in list(state):
            state[OLD_DENSE.sub(r"\1\2", name)] = state.pop(name)
    return state


def _make_options(ident: str, kind: str, state: State, released: Any | None) -> dict[str, Any]:
    options = OPTIONS.get(ident) or OPTIONS.get(kind) or OPTIONS.get(ident.partition("_")[0])
    return options(state, released) if options else {}


def construct(ident: str, state: State, args: Mapping[str, Any], released: Any | None = None) -> nn.Module:
    """The architecture that a state dict fits, with the caller's arguments.

    LoadError for an argument that it does not take, or would ignore.
    """
    shown, options = f"torchvision:{ident}", _make_options(ident, _find_kind(ident), state, released)
    refuse_reserved_arguments(args, RESERVED, shown)
    try:
        module = get_model(ident, weights=None, **{**options, **args})
    except TypeError:
        plain = get_model(ident, weights=None, **options)
        refuse_unknown_arguments(args, _list_arguments(ident, plain), shown)
        raise
    refuse_unknown_arguments(args, _list_arguments(ident, module), shown)
    return module  # type: ignore[no-any-return]


def _list_arguments(ident: str, module: nn.Module) -> list[str]:
    names = list_parameters(get_model_builder(ident), type(module))
    return [name for name in names if name not in RESERVED]


def _googlenet(state: State, released: Any | None) -> dict[str, Any]:
    # Only the released weights have no auxiliary heads, and they were trained on differently scaled inputs.
    aux = _has_prefix(state, "aux1.", otherwise=True)
    return {"aux_logits": aux, "transform_input": released is not None or not aux, "init_weights": state is None}


def _inception(state: State, released: Any | None) -> dict[str, Any]:
    aux = _has_prefix(state, "AuxLogits.", otherwise=True)
    return {"aux_logits": aux, "transform_input": released is not None, "init_weights": state is None}


def _segmentation(state: State, released: Any | None) -> dict[str, Any]:
    # Without this the builder would download backbone weights, which are overwritten anyway.
    options: dict[str, Any] = {"weights_backbone": None}
    return options | ({"aux_loss": True} if _has_prefix(state, "aux_classifier.", otherwise=False) else {})


def _vision_transformer(state: State, released: Any | None) -> dict[str, Any]:
    """The image size that follows from a state dict's positions: a square of patches and the class token."""
    shapes = [_find_shape(state or {}, name) for name in (POSITIONS, PATCHES)]
    if not all(shapes):
        return {}
    positions, patches = shapes
    return {"image_size": math.isqrt(positions[1] - 1) * patches[-1]}


def _has_prefix(state: State, prefix: str, *, otherwise: bool) -> bool:
    """Whether any name begins with a prefix, after whatever training has put before it."""
    return otherwise if state is None else any(f".{prefix}" in f".{name}" for name in state)


def _find_shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return next((tuple(value.shape) for each, value in state.items() if f".{each}".endswith(f".{name}")), ())


def _fit_image_size(module: nn.Module, shape: tuple[int, ...], transforms: Any) -> tuple[int, ...]:
    """The weights' input shape, or a transformer's own if it differs; then the transforms are set to it."""
    if not isinstance(module, VisionTransformer) or shape[1] == module.image_size:
        return shape
    side = int(module.image_size)
    transforms.resize_size = transforms.crop_size = [side]
    return (3, side, side)


def read_transforms(transforms: Any) -> Preprocessing | str:
    """The weights' own transforms as preprocessing; a text with the reason if they take no pictures."""
    name, nearest = type(transforms).__name__, from_torchvision(transforms)
    return choose_preprocessing(name, repr(transforms), transforms, nearest, f"torchvision's {name}")


OPTIONS: dict[str, Callable[[State, Any | None], dict[str, Any]]] = {
    "googlenet": _googlenet,
    "inception_v3": _inception,
    "SemanticSegmentation": _segmentation,
    "vit": _vision_transformer,
}
# The shape of one item, from the weights' transforms and meta data; segmentation takes any size.
SHAPES: dict[str, Callable[[Any, Mapping[str, Any]], tuple[int, ...]]] = {
    "ImageClassification": lambda preset, meta: (3, preset.crop_size[0], preset.crop_size[0]),
    "SemanticSegmentation": lambda preset, meta: (3, preset.resize_size[0], preset.resize_size[0]),
    "VideoClassification": lambda preset, meta: (3, max(FRAMES, meta.get("min_temporal_size", 1)), *preset.crop_size),
}
