"""Modules from torchvision: image classification, semantic segmentation and video classification."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.grammar import parse_weights, unknown_name_error
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.inputs.presets import choose_preprocessing, from_torchvision
from layertap.models.inputs.video import VideoProcessor
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    FLOAT_BITS,
    BuiltModel,
    Choice,
    construct_module,
    count_class_tokens,
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
AUXILIARY = frozenset({"aux1", "AuxLogits", "aux_classifier"})  # heads that serve training only
RESERVED = dict.fromkeys(
    ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress"), "type weights: beside args:"
)
OF_CONSTRUCTION = frozenset({"weights_backbone", "init_weights"})  # no effect once other weights are loaded
OLD_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The torchvision model ``ARCH``, the same as ``get_model`` returns for the same weights.

    Without released weights it is ``get_model(ARCH, weights=None)``; a file with the name of released weights counts
    as these. LoadError if the model or weights are unknown, not offered, or can't be read or downloaded.
    """
    shown, kind = f"torchvision:{ident}", _find_kind(ident)
    released = _find_released(ident, spec)
    state = _read_state(ident, released, spec)
    options = _make_options(ident, state, released)
    module, report = construct_module(spec, shown, partial(_construct, ident, options, spec.args), state, FLOAT_BITS)
    weights = parse_weights(spec.weights)
    entry = released or get_model_weights(ident).__members__["DEFAULT"]
    transforms = entry.transforms()
    shape = SHAPES[kind](transforms, entry.meta)
    side = getattr(module, "image_size", shape[-1])
    if len(shape) == 3 and side != shape[-1]:  # a transformer's positions are for other pictures than the weights'
        transforms.resize_size = transforms.crop_size = [side]
        shape = (3, side, side)
    name = next(iter(inspect.signature(module.forward).parameters))
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, shape),),
        architecture=shown,
        weights=f"{type(released).__name__}.{released.name}" if released and weights.is_named else weights.label,
        media=read_transforms(transforms, None if len(shape) == 3 else shape[1]),
        prefix_tokens=count_class_tokens(module),
        named=True,
        settings=describe_arguments({**options, **spec.args}, without=OF_CONSTRUCTION),
        report=report,
        labels=Labels(tuple(released.meta.get("categories", ())), "weights") if released is not None else None,
    )


def _find_kind(ident: str) -> str:
    """The class name of the architecture's preset, which tells the kind of input."""
    if ident not in list_models():
        raise unknown_name_error("torchvision", ident, filter(_is_offered, list_models()))
    if ident.startswith(QUANTIZED):
        hint = f"type torchvision:{ident.removeprefix(QUANTIZED)}"
        raise LoadError(f"torchvision:{ident} is not offered: it is made for int8 arithmetic", hint=hint)
    kind = _get_preset_name(ident)
    if kind not in SHAPES:
        raise LoadError(f"torchvision:{ident} is not offered: {kind} takes no batch of single tensors")
    return kind


def _is_offered(name: str) -> bool:
    return not name.startswith(QUANTIZED) and _get_preset_name(name) in SHAPES


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


def _make_options(ident: str, state: StateDict | None, released: Any | None) -> dict[str, Any]:
    """The builder's arguments that follow from the weights."""
    names, options = list_parameters(get_model_builder(ident)), dict[str, Any]()
    auxiliary = any(not AUXILIARY.isdisjoint(name.split(".")) for name in state or ())
    if "weights_backbone" in names:  # by default they are downloaded, and then overwritten
        options["weights_backbone"] = None
    if "aux_loss" in names and auxiliary:
        options["aux_loss"] = True
    if ident in ("googlenet", "inception_v3"):
        auxiliary = state is None or auxiliary
        # Released weights were trained on differently scaled inputs; only GoogLeNet's lack auxiliary heads.
        rescaled = released is not None or (ident == "googlenet" and not auxiliary)
        options |= {"aux_logits": auxiliary, "transform_input": rescaled, "init_weights": state is None}
    positions, patches = (_find_shape(state or {}, name) for name in (POSITIONS, PATCHES))
    if positions and patches:  # a vision transformer: a square of patches and the class token
        options["image_size"] = math.isqrt(positions[1] - 1) * patches[-1]
    return options


def _construct(ident: str, options: Mapping[str, Any], args: Mapping[str, Any]) -> nn.Module:
    """The architecture; LoadError for an argument that it does not take, or would ignore."""
    shown = f"torchvision:{ident}"
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


def _find_shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return next((tuple(value.shape) for each, value in state.items() if f".{each}".endswith(f".{name}")), ())


def read_transforms(transforms: Any, frames: int | None = None) -> Preprocessing | VideoProcessor | str:
    """The weights' own transforms as preprocessing, of videos if they have ``frames``; a text with why if none."""
    name, nearest = type(transforms).__name__, from_torchvision(transforms)
    run = transforms if frames is None else partial(_transform_frame, transforms)
    found = choose_preprocessing(name, repr(transforms), run, nearest, f"torchvision's {name}")
    return found if isinstance(found, str) or frames is None else VideoProcessor(name, found, frames, axis=1)


def _transform_frame(transforms: Any, image: Image.Image) -> Tensor:
    row: Tensor = transforms(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[:, 0]
    return row


def find_embeddings(module: nn.Module, row: Tensor) -> tuple[list[Choice], bool]:
    """As ``find_known_embeddings``: torchvision names none, and all of its models are classifiers."""
    return [], True


# The shape of one item, from the weights' transforms and meta data; segmentation takes any size.
SHAPES: dict[str, Callable[[Any, Mapping[str, Any]], tuple[int, ...]]] = {
    "ImageClassification": lambda preset, meta: (3, preset.crop_size[0], preset.crop_size[0]),
    "SemanticSegmentation": lambda preset, meta: (3, preset.resize_size[0], preset.resize_size[0]),
    "VideoClassification": lambda preset, meta: (3, max(FRAMES, meta.get("min_temporal_size", 1)), *preset.crop_size),
}
