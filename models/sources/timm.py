"""Modules from timm, which is an optional dependency."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.inputs.library_processor import LibraryProcessor, Preprocessing
from layertap.models.inputs.preprocess import from_timm
from layertap.models.inputs.proof import choose_preprocessing
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    FLOAT_BITS,
    WEIGHTS_HINT,
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
from layertap.models.sources.grammar import (
    WeightsSource,
    is_folder,
    not_installed_error,
    parse_weights,
    show_folder,
    unknown_name_error,
)
from layertap.models.spec import InputSpec, ModelSpec
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.report import LoadReport
from layertap.models.weights.state_dict import load_state_dict


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The timm model ``ARCH`` or ``ARCH.TAG``; DEFAULT is timm's own weights of that tag, or of its first.

    A folder as timm's ``save_for_hf`` writes it, with its config.json, is built as that says; DEFAULT is its weights.
    Raises LoadError where timm is not installed, does not know the name, or the weights can't be had.
    """
    timm = _import_timm()
    weights = parse_weights(spec.weights)
    saved = _read_folder(timm, Path(ident)) if is_folder(ident) else None
    if saved is None:
        _check_name(timm, ident)
    elif weights.label == "DEFAULT":
        weights = replace(weights, label="as saved", path=Path(ident))
    module, report = _create_module(timm, ident, weights, spec)
    args = {**saved.args, **spec.args} if saved else spec.args
    config = timm.data.resolve_data_config(_get_size(args), model=module)
    shape = (args.get("in_chans", CHANNELS), *config["input_size"][1:])
    name = next(iter(inspect.signature(module.forward).parameters))
    found = read_transform(timm, config) if shape[0] == CHANNELS else f"it takes {shape[0]} channels, not 3"
    tag = module.pretrained_cfg.get("tag") or "pretrained"
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, shape),),
        preprocess=None if isinstance(found, str) else found,
        no_pictures=found if isinstance(found, str) else "",
        architecture=f"timm:{saved.architecture if saved else ident}",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        weights=tag if weights.label == "DEFAULT" else weights.label,
        named=True,
        settings=describe_arguments(args),
        report=report,
        labels=_find_labels(timm, module, released=saved is None and spec.weights == "DEFAULT"),
    )


def read_transform(timm: Any, config: Mapping[str, Any]) -> Preprocessing | str:
    """What timm's own evaluation transform does; a text that says why where it takes no pictures."""
    try:
        transform = timm.data.create_transform(**config, is_training=False)
    except Exception as error:
        return f"timm makes no transform of its data configuration ({type(error).__name__})"
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:32]
    found = choose_preprocessing(LibraryProcessor("create_transform", digest, transform, nearest=from_timm(config)))
    return f"timm's transform {found}" if isinstance(found, str) else found


@dataclass(frozen=True)
class _SavedConfig:
    """What a folder's config.json says of the module: its architecture, and its constructor's arguments."""

    architecture: str
    args: dict[str, Any]


def _read_folder(timm: Any, folder: Path) -> _SavedConfig:
    """LoadError where there is no config.json of timm's, or of an architecture that it does not have."""
    shown = escape(f"timm:{folder.name}")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        architecture, args = config.get("architecture"), dict(config.get("model_args") or {})
        preset = config.get("pretrained_cfg") or config
        classes = config.get("num_classes", preset.get("num_classes"))
    except FileNotFoundError as error:
        raise LoadError(f"there is no directory with a config.json for {shown}", hint=FOLDER_HINT) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"config.json of {shown} can't be read", hint=FOLDER_HINT) from error
    if not isinstance(architecture, str):
        other = f"type transformers:{folder.name}" if "model_type" in config else FOLDER_HINT
        raise LoadError(f"config.json of {shown} names no architecture of timm", hint=other)
    if not timm.is_model(architecture):
        raise unknown_name_error("timm", architecture, timm.list_models())
    return _SavedConfig(architecture, args if classes is None else {"num_classes": classes, **args})


def _find_labels(timm: Any, module: Any, *, released: bool) -> Labels | None:
    """The classes that a folder's config.json names, or of timm's own weights those of their ImageNet."""
    config = module.pretrained_cfg
    names, subset = config.get("label_names"), timm.data.infer_imagenet_subset(config)
    if isinstance(names, (list, tuple)):
        shown = config.get("label_descriptions") or {}
        return Labels(tuple(str(shown.get(name, name)) for name in names), "config.json")
    if released and subset is not None:
        info = timm.data.ImageNetInfo(subset)
        return Labels(tuple(map(info.index_to_description, range(info.num_classes()))), "weights")
    return None


def _import_timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise not_installed_error("timm") from error
    return timm


def _check_name(timm: Any, ident: str) -> None:
    """Refuse what is not in timm's own registry: it would take hub names and directories too."""
    name, tag = timm.models.split_model_name_tag(ident)
    if not timm.is_model(name):
        raise unknown_name_error("timm", ident, timm.list_models())
    try:
        timm.get_pretrained_cfg(ident)
    except RuntimeError as error:
        tags = [full for full in timm.list_pretrained() if full.partition(".")[0] == name]
        matches = tuple(f"timm:{full}" for full in find_nearest(ident, tags, 3, cutoff=0.0))
        raise LoadError(f"timm:{name} has no weights tagged {escape(tag)}", hint=suggest(matches)) from error


def _get_size(args: Mapping[str, Any]) -> dict[str, Any]:
    """The size of pictures that a module is constructed for, where its arguments say it, as timm's data module asks."""
    size = args.get("img_size")
    if isinstance(size, (list, tuple)):
        return {"input_size": (args.get("in_chans", CHANNELS), *size)}
    return {} if size is None else {"img_size": size}


def _create_module(timm: Any, ident: str, weights: WeightsSource, spec: ModelSpec) -> tuple[Any, LoadReport | None]:
    shown, args = f"timm:{show_folder(ident)}", spec.args
    named = weights.seed is None and weights.path is None
    if named and weights.label != "DEFAULT":
        hint = f"type weights: DEFAULT, and a tag after a dot in the source, or {WEIGHTS_HINT}"
        raise LoadError(f"timm weights are not chosen by the name {escape(weights.label)}", hint=hint)
    refuse_reserved_arguments(args, RESERVED, shown)
    if named:
        return _create_released(timm, ident, args), None
    state = read_checkpoint(weights.path, spec.prefix) if weights.path else None
    with wrap_build_errors(shown), construct_alone(get_seed(spec, weights)):
        module = _construct(timm, ident, args)
    if state is None:
        return module, None
    return module, load_state_dict(module, state, weights.label, FLOAT_BITS, strict=spec.strict, adapter=spec.adapter)


def _create_released(timm: Any, ident: str, args: Mapping[str, Any]) -> Any:
    """The module with timm's own weights; LoadError for a number of classes whose head timm would draw at random."""
    if not timm.is_model_pretrained(timm.models.split_model_name_tag(ident)[0]):
        raise LoadError(f"timm publishes no weights of timm:{ident}", hint=WEIGHTS_HINT)
    published = timm.get_pretrained_cfg(ident).num_classes
    if args.get("num_classes") not in (None, 0, published):
        hint = f"type num_classes: 0 for none, or {published}, or give weights with as many"
        raise LoadError(f"timm's weights of timm:{ident} have a head of {published} classes", hint=hint)
    with wrap_download_errors("DEFAULT", f"timm:{ident}"), construct_alone(None):
        return _construct(timm, ident, args, pretrained=True)


def _construct(timm: Any, ident: str, args: Mapping[str, Any], *, pretrained: bool = False) -> Any:
    name = f"local-dir:{ident}" if is_folder(ident) else ident
    try:
        return timm.create_model(name, pretrained=pretrained, **args)
    except TypeError:
        if args:
            plain = timm.create_model(name, pretrained=False)
            known = [*list_parameters(type(plain)), *OF_BUILDER]
            refuse_unknown_arguments(args, known, f"timm:{show_folder(ident)}")
        raise


FOLDER_HINT = "type timm:FOLDER/ of what timm's save_for_hf wrote; a relative one is beside the configuration"
CHANNELS = 3  # of a picture
OF_BUILDER = ("features_only", "out_indices")  # what timm takes for every architecture
WEIGHTS_ARGUMENT = "type weights: beside args:"
RESERVED = dict.fromkeys(
    ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"), WEIGHTS_ARGUMENT
)
