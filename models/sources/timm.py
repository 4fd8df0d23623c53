"""Modules from timm, which is an optional dependency."""

from __future__ import annotations

import inspect
from typing import Any

from layertap.models.errors import LoadError, escape, find_nearest, suggest
from layertap.models.inputs.preprocess import from_timm
from layertap.models.sources.build import FLOAT_BITS, WEIGHTS_HINT, BuiltModel, wrap_build_errors, wrap_download_errors
from layertap.models.sources.construction import isolate_construction
from layertap.models.sources.grammar import WeightsSource, not_installed_error, parse_weights, unknown_name_error
from layertap.models.spec import InputSpec, ModelSpec
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.state_dict import load_state_dict


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The timm model ``ARCH`` or ``ARCH.TAG``; DEFAULT is timm's own weights of that tag, or of its first.

    Raises LoadError where timm is not installed, does not know the name, or its weights can't be had.
    """
    timm = _import_timm()
    _check_name(timm, ident)
    weights = parse_weights(spec.weights)
    module = _create_module(timm, ident, weights)
    config = timm.data.resolve_data_config({}, model=module)
    name = next(iter(inspect.signature(module.forward).parameters))
    tag = module.pretrained_cfg.get("tag") or "pretrained"
    return BuiltModel(
        module=module,
        inputs=(InputSpec(name, tuple(config["input_size"])),),
        preprocess=from_timm(config),
        architecture=f"timm:{ident}",
        prefix_tokens=int(getattr(module, "num_prefix_tokens", 0) or 0),
        weights=tag if weights.label == "DEFAULT" else weights.label,
    )


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


def _create_module(timm: Any, ident: str, weights: WeightsSource) -> Any:
    named = weights.seed is None and weights.path is None
    if named and weights.label != "DEFAULT":
        hint = f"type weights: DEFAULT, and a tag after a dot in the source, or {WEIGHTS_HINT}"
        raise LoadError(f"timm weights are not chosen by the name {escape(weights.label)}", hint=hint)
    if named:
        if not timm.is_model_pretrained(timm.models.split_model_name_tag(ident)[0]):
            raise LoadError(f"timm publishes no weights of timm:{ident}", hint=WEIGHTS_HINT)
        with wrap_download_errors("DEFAULT", f"timm:{ident}"), isolate_construction(None):
            return timm.create_model(ident, pretrained=True)
    state = read_checkpoint(weights.path) if weights.path else None
    with wrap_build_errors(f"timm:{ident}"), isolate_construction(weights.seed):
        module = timm.create_model(ident, pretrained=False)
    if state is not None:
        load_state_dict(module, state, weights.label, FLOAT_BITS)
    return module
