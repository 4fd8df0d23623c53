"""Modules from timm, which is an optional dependency."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.devices.devices import use_threads
from layertap.models.devices.memory import is_device_error
from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.grammar import WeightsSource, import_library, parse_weights, unknown_name_error
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.inputs.presets import choose_preprocessing, from_timm
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    DOWNLOAD_HINT,
    FLOAT_BITS,
    BuiltModel,
    Choice,
    construct_module,
    describe_arguments,
    list_parameters,
    read_weights,
    refuse_named_weights,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
    wrap_download_errors,
)
from layertap.models.sources.state_dict import LoadReport
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec

FOLDER_HINT = "type timm:FOLDER/ of what timm's save_for_hf wrote; a relative one is beside the configuration"
CHANNELS = 3  # of a picture
PRE_LOGITS = "what forward_head(pre_logits=True) returns"
FIRST_HEAD = "what the first of its heads takes: no layer takes what forward_head(pre_logits=True) returns"
NO_HEAD = "no head over classes: the output is what forward_head(pre_logits=True) returns"
OF_BUILDER = ("features_only", "out_indices")  # arguments that timm takes for every architecture
RESERVED = dict.fromkeys(
    ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
    "type weights: beside args:",
)


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The timm model ``ARCH`` or ``ARCH.TAG``; DEFAULT is timm's own weights of that tag, or of the first tag.

    A folder that timm's ``save_for_hf`` wrote is built from its config.json; DEFAULT is the folder's weights.
    LoadError if timm is not installed or does not know the name, or weights can't be read or downloaded.
    """
    timm = import_library("timm")
    shown = spec.shown_source
    weights = parse_weights(spec.weights)
    refuse_named_weights(weights, shown, f"type weights: DEFAULT, and a tag after a dot in the source; {DOWNLOAD_HINT}")
    refuse_reserved_arguments(spec.args, RESERVED, shown)
    architecture, args = ident, spec.args
    if is_folder := ident.endswith("/"):
        architecture, saved = _read_folder(timm, Path(ident), shown)
        args = {**saved, **spec.args}
        if weights.is_named:
            spec = replace(spec, weights=ident)
            weights = WeightsSource("as saved", path=Path(ident))
    else:
        _check_name(timm, ident)
    module, report = _create_module(timm, ident, spec, shown)
    size, channels = args.get("img_size"), args.get("in_chans", CHANNELS)
    sizes = {"input_size": (channels, *size)} if isinstance(size, (list, tuple)) else {"img_size": size} if size else {}
    config = timm.data.resolve_data_config(sizes, model=module)
    name = next(iter(inspect.signature(module.forward).parameters))
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, (channels, *config["input_size"][1:])),),
        architecture=f"timm:{architecture}",
        weights=module.pretrained_cfg.get("tag") or "pretrained" if weights.is_named else weights.label,
        media=read_transform(timm, config) if channels == CHANNELS else f"it takes {channels} channels, not 3",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        named=True,
        settings=describe_arguments(args),
        report=report,
        labels=_find_labels(timm, module, released=weights.is_named and not is_folder),
    )


def read_transform(timm: Any, config: Mapping[str, Any]) -> Preprocessing | str:
    """The evaluation transform of timm as preprocessing; a text with the reason if it takes no pictures."""
    try:
        transform = timm.data.create_transform(**config, is_training=False)
    except Exception as error:
        return f"timm makes no transform of its data configuration ({type(error).__name__})"
    settings = json.dumps(config, sort_keys=True, default=str)
    return choose_preprocessing("create_transform", settings, transform, from_timm(config), "timm's transform")


def _read_folder(timm: Any, folder: Path, shown: str) -> tuple[str, dict[str, Any]]:
    """The architecture and constructor arguments in a folder's config.json; LoadError if it has none."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        architecture, args = config.get("architecture"), dict(config.get("model_args") or {})
        preset = config.get("pretrained_cfg") or config
        classes = config.get("num_classes", preset.get("num_classes"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"there is no config.json of {escape(shown)} that can be read", hint=FOLDER_HINT) from error
    if not isinstance(architecture, str):
        other = f"type transformers:{folder.name}" if "model_type" in config else FOLDER_HINT
        raise LoadError(f"config.json of {escape(shown)} names no architecture of timm", hint=other)
    if not timm.is_model(architecture):
        raise unknown_name_error("timm", architecture, timm.list_models())
    return architecture, args if classes is None else {"num_classes": classes, **args}


def _find_labels(timm: Any, module: Any, *, released: bool) -> Labels | None:
    """The class names in a folder's config.json, or those of the ImageNet subset of timm's own weights."""
    config = module.pretrained_cfg
    names, subset = config.get("label_names"), timm.data.infer_imagenet_subset(config)
    if isinstance(names, (list, tuple)):
        shown = config.get("label_descriptions") or {}
        return Labels(tuple(str(shown.get(name, name)) for name in names), "config.json")
    if released and subset is not None:
        info = timm.data.ImageNetInfo(subset)
        return Labels(tuple(map(info.index_to_description, range(info.num_classes()))), "weights")
    return None


def _check_name(timm: Any, ident: str) -> None:
    """LoadError for names that are not in timm's registry: timm would also accept hub names and directories."""
    name, tag = timm.models.split_model_name_tag(ident)
    if not timm.is_model(name):
        raise unknown_name_error("timm", ident, timm.list_models())
    try:
        timm.get_pretrained_cfg(ident)
    except RuntimeError as error:
        tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == name]
        matches = tuple(f"timm:{full}" for full in find_nearest(ident, tags, 3, cutoff=0.0))
        raise LoadError(f"timm:{name} has no weights tagged {escape(tag)}", hint=suggest(matches)) from error


def _create_module(timm: Any, ident: str, spec: ModelSpec, shown: str) -> tuple[Any, LoadReport | None]:
    """The module with weights of a file or a seed, or timm's own; LoadError.

    Another number of classes than timm's weights have is refused: timm would draw the head at random.
    """
    create = partial(_construct, timm, ident, spec.args, shown)
    if not parse_weights(spec.weights).is_named:
        return construct_module(spec, shown, create, read_weights(spec), FLOAT_BITS)
    if not timm.is_model_pretrained(timm.models.split_model_name_tag(ident)[0]):
        raise LoadError(f"timm publishes no weights of {shown}", hint=DOWNLOAD_HINT)
    published = timm.get_pretrained_cfg(ident).num_classes
    if spec.args.get("num_classes") not in (None, 0, published):
        hint = f"type num_classes: 0 for none, or {published}, or give weights with as many"
        raise LoadError(f"timm's weights of {shown} have a head of {published} classes", hint=hint)
    with wrap_download_errors("DEFAULT", shown), construct_alone(None):
        return create(pretrained=True), None


def _construct(timm: Any, ident: str, args: Mapping[str, Any], shown: str, *, pretrained: bool = False) -> Any:
    name = f"local-dir:{ident}" if ident.endswith("/") else ident
    try:
        return timm.create_model(name, pretrained=pretrained, **args)
    except TypeError:
        if args:
            plain = timm.create_model(name, pretrained=False)
            refuse_unknown_arguments(args, [*list_parameters(type(plain)), *OF_BUILDER], shown)
        raise


def find_embeddings(module: Any, row: Tensor) -> tuple[list[Choice], bool]:
    """As ``find_known_embeddings``: what the head of a timm model takes."""
    head = module.get_classifier() if hasattr(module, "forward_head") else None
    if isinstance(head, nn.Identity):
        return [(EmbeddingSpec("."), NO_HEAD, False)], False
    first = head[0] if isinstance(head, (tuple, list, nn.ModuleList)) else head
    classifier = [name for name, part in module.named_modules() if part is first]
    try:
        takers = _find_takers(module, row)
    except Exception as error:  # a user's subclass may have another forward
        if is_device_error(error):
            raise
        takers = []
    if not takers:
        return [(EmbeddingSpec(f"{name}:input"), FIRST_HEAD, True) for name in classifier], True
    names = [name for name in classifier if name in takers] or takers[:1]
    return [(EmbeddingSpec(f"{name}:input"), PRE_LOGITS, False) for name in names], True


def _find_takers(module: Any, row: Tensor) -> list[str]:
    """The layers that take what forward_head(pre_logits=True) returns, in the order in which they run."""
    takers: list[str] = []

    def note(name: str, _: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0], wanted):
            takers.append(name)

    with torch.no_grad(), use_threads(1), ExitStack() as stack:
        features = module.forward_features(row)
        wanted = module.forward_head(features, pre_logits=True)
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(partial(note, name)).remove)
        module.forward_head(features)
    return takers
