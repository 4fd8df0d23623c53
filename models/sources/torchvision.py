"""Modules from torchvision: image classification, semantic segmentation and video classification."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torchvision.models import VisionTransformer, get_model, get_model_builder, get_model_weights, list_models
from torchvision.models.video import MViT

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.inputs.library_processor import LibraryProcessor, Preprocessing
from layertap.models.inputs.preprocess import from_torchvision
from layertap.models.inputs.proof import choose_preprocessing
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    FLOAT_BITS,
    BuiltModel,
    describe_arguments,
    get_seed,
    list_parameters,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
    wrap_build_errors,
    wrap_download_errors,
)
from layertap.models.sources.construction import construct_alone
from layertap.models.sources.grammar import WeightsSource, parse_weights, unknown_name_error
from layertap.models.spec import InputSpec, ModelSpec
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.state_dict import load_state_dict

FRAMES = 16
State = Mapping[str, Tensor] | None


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The torchvision model ``ARCH``, as ``get_model`` gives it for the same weights.

    Without released weights it is ``get_model(ARCH, weights=None)``; a file with the name of released weights is
    taken for them. Raises LoadError for what is unknown, not offered, or can't be had.
    """
    kind = _find_kind(ident)
    members = get_model_weights(ident).__members__
    weights = parse_weights(spec.weights)
    released = _find_released(ident, members, weights)
    state = _read_state(ident, released, weights, spec.prefix)
    with wrap_build_errors(f"torchvision:{ident}"), construct_alone(get_seed(spec, weights)):
        module = construct(ident, state, spec.args, released)
    label = weights.label if weights.path or released is None else f"{type(released).__name__}.{released.name}"
    report = (
        None
        if state is None
        else load_state_dict(module, state, label, FLOAT_BITS, strict=spec.strict, adapter=spec.adapter)
    )
    entry = released or members["DEFAULT"]
    name = next(iter(inspect.signature(module.forward).parameters))
    options = _make_options(ident, kind, state, released)
    transforms = entry.transforms()
    shape = _fit_image_size(module, SHAPES[kind](transforms, entry.meta), transforms)
    found = read_transforms(transforms) if len(shape) == 3 else f"torchvision's {kind} takes no single pictures"
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, shape),),
        preprocess=None if isinstance(found, str) else found,
        no_pictures=found if isinstance(found, str) else "",
        architecture=f"torchvision:{ident}",
        prefix_tokens=_prefix_tokens(module),
        weights=label,
        named=True,
        settings=describe_arguments({**options, **spec.args}, without=OF_CONSTRUCTION),
        report=report,
        labels=Labels(tuple(released.meta.get("categories", ())), "weights") if released is not None else None,
    )


def list_classifiers() -> list[str]:
    """Architectures for image classification, sorted; those made for quantisation left out."""
    return [name for name in list_offered() if _get_preset_name(name) == "ImageClassification"]


def _find_kind(ident: str) -> str:
    """The class name of the architecture's preset, which says what it takes."""
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


def _find_released(ident: str, members: Mapping[str, Any], weights: WeightsSource) -> Any | None:
    """The weights that torchvision publishes and that are meant, by name or by their file's name."""
    if weights.seed is not None:
        return None
    if weights.path is not None:
        files = {member.url.rpartition("/")[2]: member for member in members.values()}
        return files.get(weights.path.name)
    prefix, name = type(members["DEFAULT"]).__name__ + ".", weights.label
    if (member := members.get(name.removeprefix(prefix))) is not None:
        return member
    names = ", ".join(members)
    hint = suggest(find_nearest(name, members)) or f"type one of {names}"
    raise LoadError(f"torchvision:{ident} has weights {names}, and none named {escape(name)}", hint=hint)


def _read_state(ident: str, released: Any | None, weights: WeightsSource, prefix: str) -> State:
    if weights.path is not None:
        state = read_checkpoint(weights.path, prefix)
    elif released is not None:
        # The builders' own download would unpickle whatever lies in torch's cache; this one reads tensors only.
        with wrap_download_errors(weights.label, f"torchvision:{ident}"):
            state = released.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
    else:
        return None
    return _rename_dense_layers(ident, _drop_auxiliary_heads(ident, state, released))


def _drop_auxiliary_heads(ident: str, state: dict[str, Tensor], released: Any | None) -> dict[str, Tensor]:
    """GoogLeNet's released file holds heads that torchvision drops once it has loaded them."""
    if ident == "googlenet" and released is not None:
        for name in [name for name in state if name.startswith(("aux1.", "aux2."))]:
            del state[name]
    return state


def _rename_dense_layers(ident: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """DenseNet's released files have names from before dots in module names were forbidden."""
    if ident.startswith("densenet"):
        for name in list(state):
            state[OLD_DENSE.sub(r"\1\2", name)] = state.pop(name)
    return state


def _make_options(ident: str, kind: str, state: State, released: Any | None) -> dict[str, Any]:
    options = OPTIONS.get(ident) or OPTIONS.get(kind) or OPTIONS.get(ident.partition("_")[0])
    return options(state, released) if options else {}


def construct(ident: str, state: State, args: Mapping[str, Any], released: Any | None = None) -> nn.Module:
    """The architecture as a state dict has it, with the caller's arguments.

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
    # Only the released weights come without auxiliary heads, and they were trained on inputs scaled another way.
    aux = _has_prefix(state, "aux1.", otherwise=True)
    return {"aux_logits": aux, "transform_input": released is not None or not aux, "init_weights": state is None}


def _inception(state: State, released: Any | None) -> dict[str, Any]:
    aux = _has_prefix(state, "AuxLogits.", otherwise=True)
    return {"aux_logits": aux, "transform_input": released is not None, "init_weights": state is None}


def _segmentation(state: State, released: Any | None) -> dict[str, Any]:
    # Without this the builder would download the backbone's weights only to have them overwritten.
    options: dict[str, Any] = {"weights_backbone": None}
    return options | ({"aux_loss": True} if _has_prefix(state, "aux_classifier.", otherwise=False) else {})


def _vision_transformer(state: State, released: Any | None) -> dict[str, Any]:
    """The image size that a state dict's positions were made for: a square of patches, and the class token."""
    shapes = [_find_shape(state or {}, name) for name in (POSITIONS, PATCHES)]
    if not all(shapes):
        return {}
    positions, patches = shapes
    return {"image_size": math.isqrt(positions[1] - 1) * patches[-1]}


def _has_prefix(state: State, prefix: str, *, otherwise: bool) -> bool:
    """Whether names begin so, whatever training has put before them."""
    return otherwise if state is None else any(f".{prefix}" in f".{name}" for name in state)


def _find_shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return next((tuple(value.shape) for each, value in state.items() if f".{each}".endswith(f".{name}")), ())


def _prefix_tokens(module: nn.Module) -> int:
    return int(isinstance(module, VisionTransformer | MViT))


def _fit_image_size(module: nn.Module, shape: tuple[int, ...], transforms: Any) -> tuple[int, ...]:
    """The weights' shape; of a transformer made for another size than theirs that one, which their transforms get."""
    if not isinstance(module, VisionTransformer) or shape[1] == module.image_size:
        return shape
    side = int(module.image_size)
    transforms.resize_size = transforms.crop_size = [side]
    return (3, side, side)


def read_transforms(transforms: Any) -> Preprocessing | str:
    """What the weights' own transforms do; a text that says why where they take no pictures."""
    digest = hashlib.sha256(repr(transforms).encode()).hexdigest()[:32]
    name = type(transforms).__name__
    found = choose_preprocessing(LibraryProcessor(name, digest, transforms, nearest=from_torchvision(transforms)))
    return f"torchvision's {name} {found}" if isinstance(found, str) else found


def _image_shape(preset: Any, meta: Mapping[str, Any]) -> tuple[int, ...]:
    return (3, preset.crop_size[0], preset.crop_size[0])


def _scene_shape(preset: Any, meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Any size will do; this is a square image's."""
    return (3, preset.resize_size[0], preset.resize_size[0])


def _clip_shape(preset: Any, meta: Mapping[str, Any]) -> tuple[int, ...]:
    return (3, max(FRAMES, meta.get("min_temporal_size", 1)), *preset.crop_size)


POSITIONS, PATCHES = "encoder.pos_embedding", "conv_proj.weight"
QUANTIZED = "quantized_"
WEIGHTS_ARGUMENT = "type weights: beside args:"
RESERVED = dict.fromkeys(
    ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress"), WEIGHTS_ARGUMENT
)
OF_CONSTRUCTION = frozenset({"weights_backbone", "init_weights"})  # nothing of these is left where weights come after
OLD_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
REFUSED = {
    "ObjectDetection": "detection takes a list of images with their boxes, not a batch",
    "OpticalFlow": "optical flow takes two images an item",
}
OPTIONS: dict[str, Callable[[State, Any | None], dict[str, Any]]] = {
    "googlenet": _googlenet,
    "inception_v3": _inception,
    "SemanticSegmentation": _segmentation,
    "vit": _vision_transformer,
}
SHAPES: dict[str, Callable[[Any, Mapping[str, Any]], tuple[int, ...]]] = {
    "ImageClassification": _image_shape,
    "SemanticSegmentation": _scene_shape,
    "VideoClassification": _clip_shape,
}
