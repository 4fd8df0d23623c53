"""Models of the transformers library, which is an optional dependency, from a local directory.

Nothing is downloaded, no code in the directory is run, nothing is unpickled.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.catalog import trials
from layertap.models.devices.devices import TOLERANCE, use_threads
from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape, format_names
from layertap.models.grammar import ADAPTER_CONFIG, get_base_name, parse_weights, refuse_adapter
from layertap.models.inputs.noise import make_noise_row
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.labels import Labels
from layertap.models.run.replica import call_module
from layertap.models.sources.adapters import merge_adapter
from layertap.models.sources.build import (
    BuiltModel,
    construct_module,
    import_library,
    read_weights,
    refuse_named_weights,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
    wrap_build_errors,
)
from layertap.models.sources.checkpoints import find_weights, read_checkpoint
from layertap.models.sources.embeddings import KnownEmbedding
from layertap.models.sources.sentence_head import LAYER, attach_head, read_sentence_folder
from layertap.models.sources.state_dict import LoadReport, has_same_values, raise_for_different, refuse_scales
from layertap.models.sources.transformers_inputs import (
    LOCAL,
    MASK,
    PATCH_SHAPES,
    count_class_tokens,
    find_modality,
    load_tokenizer,
    make_input_specs,
    make_text_spec,
    read_preset,
    split_towers,
)
from layertap.models.spec import EmbeddingChoice, InputSpec, ModelSpec

FLOAT_BYTES = 4
PLAIN = {"use_cache": False, "return_dict": True, "output_hidden_states": False, "output_attentions": False}
IRRELEVANT = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id", *PLAIN}
)
MASKED, SKIPS = "sdpa_always_masked", ("allow_is_causal_skip", "allow_is_bidirectional_skip")
LABELS, MULTI_LABEL = "num_labels", "multi_label_classification"
INTERPOLATE = "interpolate_pos_encoding"
ITS_OWN = "it says what the directory is: change its config.json"
RESERVED = {
    **dict.fromkeys(("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"), ITS_OWN),
    **dict.fromkeys(("dtype", "torch_dtype"), "type dtype: beside args:"),
    **dict.fromkeys(PLAIN, "the server decides what a forward returns"),
    "fusion_config": "leave it out: fused layers would be put into other models too",
}
SAVED = "what modules.json of the sentence-transformers folder makes"
DIRECTORY_HINT = "type transformers:PATH of what save_pretrained wrote; a relative PATH is beside the configuration"
FIT_HINT = "save the whole model with save_pretrained, or name the saved class in architectures of config.json"


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The model in the directory ``ident``: config.json, model.safetensors or its shards, tokenizer, preprocessor.

    Its class is the first of the configuration's ``architectures`` if transformers has it, else AutoModel's. DEFAULT is
    the directory's own weights. LoadError if transformers is not installed, the directory is invalid, weights are
    missing or do not fit, or the model's inputs can't be told from its class.
    """
    library = import_library("transformers")
    logs = importlib.import_module("transformers.utils.logging")
    logs.set_verbosity_error()  # its warnings contain directories
    logs.disable_progress_bar()
    folder, shown = Path(ident), escape(f"transformers:{get_base_name(ident)}")
    sentence = read_sentence_folder(folder, shown)
    folder = sentence.transformer if sentence else folder
    if not (folder / "config.json").is_file():
        refuse_adapter(folder)
        raise LoadError(f"there is no directory with a config.json for {shown}", hint=DIRECTORY_HINT)
    with wrap_build_errors(shown):
        config = library.AutoConfig.from_pretrained(str(folder), **LOCAL)
        if spec.args:
            refuse_reserved_arguments(spec.args, RESERVED, shown)
            refuse_unknown_arguments(spec.args, [*config.to_dict(), LABELS], shown)
            config = library.AutoConfig.from_pretrained(str(folder), **{**spec.args, **LOCAL})
        architecture = _find_architecture(library, config, encoder=sentence is not None)
    if getattr(config, "fusion_config", None):
        detail = f"config.json of {shown} asks for fused layers, which would be put into other models too"
        raise LoadError(detail, hint="take fusion_config out of it")
    if dict(getattr(config, "quantization_config", None) or {}).get("load_in_4bit"):
        detail = f"{shown} holds 4-bit weights of bitsandbytes, whose values are other ones here than in the library"
        raise LoadError(detail, hint="save what its dequantize() returns")
    weights = parse_weights(spec.weights)
    refuse_named_weights(weights, shown)
    report: LoadReport | None
    if weights.is_named:
        module, report = _load_saved(architecture, folder, config, spec, shown)
    else:
        construct = partial(architecture, config)
        module, report = construct_module(spec, shown, construct, read_weights(spec), classes=LABELS)
    settings = _describe_settings(config)
    _set_plain_outputs(module)
    text = None
    modality = find_modality(module) if spec.inputs is None else "other"
    two_towers = modality in ("text", "both") and split_towers(module) and modality == "both"
    if spec.interpolate_pos_encoding:
        _interpolate_positions(module)
    if modality == "text" or two_towers:
        text = make_text_spec(module, load_tokenizer(library, folder, shown, sentence), sentence)
    pictures: Preprocessing | str = ""
    if modality == "text" and PATCH_SHAPES in inspect.signature(module.forward).parameters:
        pictures = f"{type(module).__name__} takes them in patches, with {PATCH_SHAPES}"
    elif spec.preprocess == "preset" and modality != "text":
        backend = "pil" if spec.image_backend == "auto" and spec.decode != "exact" else spec.image_backend
        pictures = read_preset(library, folder, backend)
    inputs = spec.inputs or make_input_specs(module, text, pictures, shown)
    takes_pictures = two_towers or (len(inputs) == 1 and len(inputs[0].shape) == 3)
    if any(each.name == MASK for each in inputs):
        _always_mask_attention(library, module, text.inputs() if text else inputs)
    if sentence:
        attach_head(module, sentence, shown)
        settings = f"{settings}{sentence.describe()}"
    return BuiltModel(
        module=module,
        inputs=inputs,
        pictures=pictures if isinstance(pictures, str) or takes_pictures else "",
        architecture=f"transformers:{type(module).__name__}",
        prefix_tokens=0 if modality == "text" else count_class_tokens(module),
        weights="as saved" if weights.label == "DEFAULT" else weights.label,
        named=True,
        settings=settings,
        text=text,
        report=report,
        labels=_find_labels(config),
        embedding=KnownEmbedding((EmbeddingChoice(LAYER, SAVED),)) if sentence else None,
        two_towers=two_towers,
        outputs="multi_label_logits" if getattr(config, "problem_type", None) == MULTI_LABEL else None,
    )


def _interpolate_positions(module: nn.Module) -> None:
    """Make each forward interpolate position tables for pictures of other sizes; LoadError if it can't."""
    if INTERPOLATE not in inspect.signature(module.forward).parameters:
        detail = f"{type(module).__name__} has no {INTERPOLATE}"
        raise LoadError(detail, hint=f"leave {INTERPOLATE} out: it takes other sizes as it is, or none")
    module.forward = partial(module.forward, **{INTERPOLATE: True})


def _find_labels(config: Any) -> Labels | None:
    """The classes that config.json names; None if the library only numbers them."""
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    return None if names == [f"LABEL_{number}" for number in range(len(names))] else Labels(tuple(names), "config.json")


def _set_plain_outputs(module: Any) -> None:
    """Turn off caches and extra outputs, and remove the directory's name."""
    for part in module.modules():
        if not hasattr(part, "config"):
            continue
        for name, value in PLAIN.items():
            if getattr(part.config, name, value) != value:
                setattr(part.config, name, value)
        if hasattr(part, "name_or_path"):
            part.name_or_path = ""


def _always_mask_attention(library: Any, module: Any, inputs: Sequence[InputSpec]) -> None:
    """Always pass attention a mask, even if nothing is padded, unless that changes the model's values.

    By default the library omits an all-ones mask, so that the other rows of a batch decide which arguments layers get
    and which kernel runs. Some classes compute differently if attention has another name, or a mask.
    """
    parts = [part for part in module.modules() if isinstance(part, library.PreTrainedModel)]
    for part in parts:
        asks_for_name = '"sdpa"' in inspect.getsource(sys.modules[type(part).__module__])
        is_sdpa = getattr(part.config, "_attn_implementation", None) == "sdpa"
        if asks_for_name or not is_sdpa or not part._can_set_attn_implementation():
            return
    masks = importlib.import_module("transformers.masking_utils")

    def always_mask(*args: Any, **options: Any) -> Any:
        return masks.sdpa_mask(*args, **{**options, **dict.fromkeys(SKIPS, False)})

    library.AttentionInterface.register(MASKED, library.AttentionInterface()["sdpa"])
    library.AttentionMaskInterface.register(MASKED, always_mask)
    specs = [replace(spec, shape=(min(trials.SHORT, spec.shape[0]),)) if spec.longest else spec for spec in inputs]
    row = make_noise_row(specs, module.device, module.dtype)
    run = partial(call_module, module=module.eval())
    # On one thread: a process that forks after multithreaded operations can't use several threads in the child.
    with torch.no_grad(), use_threads(1):
        alone = trials.try_forward(run, row)
        module.set_attn_implementation(MASKED)
        if alone is not None and not trials.has_same_values(alone, trials.try_forward(run, row), TOLERANCE["bfloat16"]):
            module.set_attn_implementation("sdpa")


def _describe_settings(config: Any) -> str:
    """The configuration's settings that affect results and differ from the library's defaults, as text."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in IRRELEVANT}
    return json.dumps(settings, sort_keys=True, default=str)


def _load_saved(architecture: Any, folder: Path, config: Any, spec: ModelSpec, shown: str) -> tuple[Any, LoadReport]:
    """The module with the directory's weights. LoadError if they do not fit: transformers would only warn."""
    file = find_weights(folder)  # read by our own code: the library gets tensors, never a pickle
    # For any other dtype the library would change the process's default dtype while it constructs the module.
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with wrap_build_errors(shown), construct_alone(None if spec.strict else 0):
        module, info = architecture.from_pretrained(
            None, config=config, state_dict=read_checkpoint(file), **options, **LOCAL
        )
    found_missing = _drop_unsaved_pooler(module, info["missing_keys"])
    missing = [name for name in sorted(found_missing) if name not in module.all_tied_weights_keys]
    wrong = {
        "missing": [escape(name) for name in missing if spec.strict],
        "of another shape": [escape(str(entry[0])) for entry in info["mismatched_keys"]],
        "unreadable": [escape(str(entry)) for entry in info["error_msgs"]],
    }
    differences = "; ".join(f"{kind}: {format_names(names)}" for kind, names in wrong.items() if names)
    if differences:
        raise LoadError(f"the weights of {shown} do not fit its config.json: {differences}", hint=FIT_HINT)
    for value in (*module.parameters(), *module.buffers()):
        # Some are memory-mapped: a write to the file would change the model or crash the process.
        value.data = value.data.clone()
    # Read again: the library may hold, and have changed, the very tensors that it was given.
    tensors, left_over = read_checkpoint(file), tuple(sorted(info["unexpected_keys"]))
    refuse_scales(tensors, left_over, shown)
    raise_for_different(_list_different(module, tensors), shown)
    has_adapter = (folder / ADAPTER_CONFIG).is_file() and not spec.adapter
    if has_adapter:  # the library merges it too
        merge_adapter(module, folder)
    return module, LoadReport("", "", tuple(missing), left_over, adapter=folder.name if has_adapter else "")


def _drop_unsaved_pooler(module: Any, missing: Set[str]) -> Set[str]:
    """Remove a pooler that was not saved (``add_pooling_layer=False``); return the names that are still missing."""
    names = {name for name in module.state_dict() if name.startswith("pooler.")}
    if names and names <= missing and "add_pooling_layer" in inspect.signature(type(module)).parameters:
        module.pooler = None
        return missing - names
    return missing


def _list_different(module: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the directory's tensors whose values differ in the module; names that the module lacks are skipped.

    The module is compared in the form in which it would be saved: some models merge, split or rename tensors. Some
    classes set the padding's row of a loaded table to 0.
    """
    state = module.state_dict()
    tables = ((name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Embedding))
    padding = {f"{name}.weight": part.padding_idx for name, part in tables if part.padding_idx is not None}
    with suppress(Exception):  # some conversions can't be reverted
        state = importlib.import_module("transformers.core_model_loading").revert_weight_conversion(module, state)
    prefix, tied = f"{module.base_model_prefix}.", module.all_tied_weights_keys
    wrong = []
    for key, given in tensors.items():
        # A base model may load the file of a model with a head, and the other way round.
        name = next((each for each in (key, prefix + key, key.removeprefix(prefix)) if each in state), None)
        if name is None or name in tied:
            continue
        allowed = [given]
        if name in padding:
            padded = given.clone()
            padded[padding[name] : padding[name] + 1] = 0
            allowed.append(padded)
        if not any(_is_unchanged(state[name], each, module.config.dtype) for each in allowed):
            wrong.append(key)
    return wrong


def _is_unchanged(held: Tensor, given: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor has a file's values, rounded at most to its model's dtype."""
    rounded = held.is_floating_point() and held.dtype.itemsize < FLOAT_BYTES and held.dtype != dtype
    return not held.is_meta and not rounded and has_same_values(held, given)


def _find_architecture(library: Any, config: Any, *, encoder: bool) -> Any:
    """The class that wrote the directory if it is one of the library's own models, else AutoModel's.

    For an ``encoder`` it is AutoModel's, unless the library has a class without the decoder (T5EncoderModel).
    """
    name = next(iter(config.architectures or ()), None)
    if encoder:
        name = type(config).__name__.replace("Config", "EncoderModel")
    found = getattr(library, name, None) if isinstance(name, str) and name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, library.PreTrainedModel):
        return found
    # AutoModel itself would search for adapters beside the weights, even if it is given tensors.
    return importlib.import_module("transformers.models.auto.auto_factory")._get_model_class(
        config, library.MODEL_MAPPING
    )
