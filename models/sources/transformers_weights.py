"""Modules of the transformers library with their weights, compared with what their directory holds."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layertap.models.errors import LoadError, escape, format_names
from layertap.models.sources.build import get_seed, wrap_build_errors
from layertap.models.sources.construction import construct_alone
from layertap.models.sources.grammar import WeightsSource
from layertap.models.spec import ModelSpec
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.folders import FILES, find_weights
from layertap.models.weights.report import LoadReport
from layertap.models.weights.state_dict import (
    has_same_values,
    load_state_dict,
    raise_for_different,
)

LOCAL = {"local_files_only": True, "trust_remote_code": False}
SAFETENSORS = FILES[:2]
FLOAT_BYTES = 4
FIT_HINT = "save the whole model with save_pretrained, or name the saved class in architectures of config.json"


def build_module(
    library: Any, folder: Path, config: Any, weights: WeightsSource, spec: ModelSpec, shown: str, *, encoder: bool
) -> tuple[Any, LoadReport | None]:
    """The module of a configuration with the weights of its directory, of a file or of a seed; LoadError.

    ``encoder``: the class that makes hidden states of texts, whichever wrote the directory.
    """
    named = weights.seed is None and weights.path is None
    if named and weights.label != "DEFAULT":
        hint = "type DEFAULT, PATH.safetensors, PATH.pth or random:SEED"
        raise LoadError(f"{shown} has no weights named {escape(weights.label)}", hint=hint)
    if named:
        return _load_saved(library, folder, config, spec, shown, encoder=encoder)
    state = read_checkpoint(weights.path, spec.prefix) if weights.path else None
    with wrap_build_errors(shown), construct_alone(get_seed(spec, weights)):
        architecture = _find_architecture(library, config, encoder=encoder)
        if architecture is not None:
            module = architecture(config)
        else:
            module = library.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if state is None:
        return module, None
    return module, load_state_dict(
        module, state, weights.label, classes="num_labels", strict=spec.strict, adapter=spec.adapter
    )


def _load_saved(
    library: Any, folder: Path, config: Any, spec: ModelSpec, shown: str, *, encoder: bool
) -> tuple[Any, LoadReport]:
    """The module with the directory's weights: transformers would draw what is missing at random, and only warn."""
    file = find_weights(folder)
    # What torch.save wrote is read here: the library is given tensors, and no pickle.
    state = None if file.name in SAFETENSORS else read_checkpoint(file)
    location = str(folder) if state is None else None
    architecture = _find_architecture(library, config, encoder=encoder) or library.AutoModel
    # In another dtype the library would make it the whole process's default while it constructs the module.
    options = {"dtype": torch.float32, "use_safetensors": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with wrap_build_errors(shown), construct_alone(None if spec.strict else 0):
        module, info = architecture.from_pretrained(location, config=config, state_dict=state, **options, **LOCAL)
    tied = _get_tied_weights(module)
    missing = [name for name in sorted(_drop_unsaved_pooler(module, info["missing_keys"])) if name not in tied]
    wrong = {
        "missing": [escape(name) for name in missing if spec.strict],
        "of another shape": [escape(str(entry[0])) for entry in info["mismatched_keys"]],
        "unreadable": [escape(str(entry)) for entry in info["error_msgs"]],
    }
    differences = "; ".join(f"{kind}: {format_names(names)}" for kind, names in wrong.items() if names)
    if differences:
        raise LoadError(f"the weights of {shown} do not fit its config.json: {differences}", hint=FIT_HINT)
    _copy_mapped_weights(module)
    raise_for_different(_list_different(module, state or read_checkpoint(file)), shown)
    return module, LoadReport(missing=tuple(missing), left_over=tuple(sorted(info["unexpected_keys"])))


def _drop_unsaved_pooler(module: Any, missing: Set[str]) -> Set[str]:
    """The missing names that remain once a pooler is removed that was not saved (``add_pooling_layer=False``)."""
    names = {name for name in module.state_dict() if name.startswith("pooler.")}
    if names and names <= missing and "add_pooling_layer" in inspect.signature(type(module)).parameters:
        module.pooler = None
        return missing - names
    return missing


def _copy_mapped_weights(module: Any) -> None:
    """Copy what from_pretrained maps from the file: a write to the file would change the model, or end the process."""
    for value in (*module.parameters(), *module.buffers()):
        value.data = value.data.clone()


def _list_different(module: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the directory's tensors whose values the module does not hold, as far as they are its own.

    They are compared as the module would be saved: some models merge, split or rename what is in the file. Some classes
    write 0 to the row of padding of what they load.
    """
    state = module.state_dict()
    tables = ((name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Embedding))
    padding = {f"{name}.weight": part.padding_idx for name, part in tables if part.padding_idx is not None}
    with suppress(Exception):  # what a model does with them may be of a kind that is not undone
        state = importlib.import_module("transformers.core_model_loading").revert_weight_conversion(module, state)
    prefix, tied = f"{module.base_model_prefix}.", _get_tied_weights(module)
    wrong = []
    for key, given in tensors.items():
        # A head's file may be read for its base, and the base's for its head.
        name = next((each for each in (key, prefix + key, key.removeprefix(prefix)) if each in state), None)
        if name is None or name in tied or _is_unchanged(state[name], given, module.config.dtype):
            continue
        if name in padding:
            given = given.clone()
            given[padding[name] : padding[name] + 1] = 0
        if name not in padding or not _is_unchanged(state[name], given, module.config.dtype):
            wrong.append(key)
    return wrong


def _is_unchanged(held: Tensor, given: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor has a file's values, rounded no further than to its model's dtype."""
    rounded = held.is_floating_point() and held.dtype.itemsize < FLOAT_BYTES and held.dtype != dtype
    return not held.is_meta and not rounded and has_same_values(held, given)


def _find_architecture(library: Any, config: Any, *, encoder: bool) -> Any | None:
    """The class that wrote the directory, where it is one of the library's own models; None: AutoModel's.

    An ``encoder`` is AutoModel's, unless the library has one without a decoder (T5EncoderModel).
    """
    names = (config.architectures or ())[:1]
    if encoder:
        names = (type(config).__name__.replace("Config", "EncoderModel"),)
    for name in names:
        architecture = getattr(library, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(architecture, type) and issubclass(architecture, library.PreTrainedModel):
            return architecture
    return None


def _get_tied_weights(module: Any) -> dict[str, str]:
    """Parameters that the architecture itself declares to be others, by name."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})
