"""Models of the transformers library, which is an optional dependency, from a local directory.

Nothing is fetched, no code of the directory is run, nothing is unpickled.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layertap.models.catalog.trials import SHORT, has_same_values, try_forward
from layertap.models.devices.dtypes import TOLERANCE
from layertap.models.devices.threads import use_threads
from layertap.models.errors import LoadError, escape
from layertap.models.inputs.noise import make_noise_row
from layertap.models.labels import Labels
from layertap.models.replica import call_module
from layertap.models.selection.embedding import EmbeddingChoice
from layertap.models.sources.build import (
    BuiltModel,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
    wrap_build_errors,
)
from layertap.models.sources.embeddings import KnownEmbedding
from layertap.models.sources.grammar import get_base_name, not_installed_error, parse_weights
from layertap.models.sources.sentence_head import LAYER, attach_head, read_sentence_folder
from layertap.models.sources.tokenizer import load_tokenizer
from layertap.models.sources.transformers_inputs import (
    MASK,
    PATCH_SHAPES,
    count_class_tokens,
    find_modality,
    make_input_specs,
    make_text_spec,
    read_preset,
    split_towers,
)
from layertap.models.sources.transformers_weights import LOCAL, build_module
from layertap.models.spec import InputSpec, ModelSpec
from layertap.models.weights.folders import refuse_adapter

PLAIN = {"use_cache": False, "return_dict": True, "output_hidden_states": False, "output_attentions": False}
IRRELEVANT = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id", *PLAIN}
)
MASKED, SKIPS = "sdpa_always_masked", ("allow_is_causal_skip", "allow_is_bidirectional_skip")
LABELS = "num_labels"
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


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The model in the directory ``ident``: config.json, model.safetensors or its shards, tokenizer, preprocessor.

    Its class is the first of the configuration's ``architectures`` that transformers has, else AutoModel's. DEFAULT
    takes the directory's own weights. LoadError where transformers is not installed, the directory is not as it should
    be, weights are missing or do not fit, or what the model takes can't be told from its class.
    """
    library = _import_library()
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
    if getattr(config, "fusion_config", None):
        detail = f"config.json of {shown} asks for fused layers, which would be put into other models too"
        raise LoadError(detail, hint="take fusion_config out of it")
    weights = parse_weights(spec.weights)
    module, report = build_module(library, folder, config, weights, spec, shown, encoder=sentence is not None)
    settings = _describe_settings(config)
    _set_plain_outputs(module)
    tokenizer, text = None, None
    modality = find_modality(module) if spec.inputs is None else "other"
    two_towers = modality in ("text", "both") and split_towers(module) and modality == "both"
    if spec.interpolate_pos_encoding:
        _interpolate_positions(module)
    if modality == "text" or two_towers:
        tokenizer = load_tokenizer(library, folder, shown, LOCAL, sentence)
        text = make_text_spec(module, tokenizer, sentence)
    wanted = spec.preprocess == "preset" and modality != "text"
    found = read_preset(library, folder, spec.image_backend) if wanted else ""
    if modality == "text" and PATCH_SHAPES in inspect.signature(module.forward).parameters:
        found = f"{type(module).__name__} takes them in patches, with {PATCH_SHAPES}"
    preset, no_pictures = (None, found) if isinstance(found, str) else (found, "")
    inputs = spec.inputs or make_input_specs(module, text, preset, shown)
    if any(each.name == MASK for each in inputs):
        _always_mask_attention(library, module, text.inputs() if text else inputs)
    if sentence:
        attach_head(module, sentence, shown)
        settings = f"{settings}{sentence.describe()}"
    return BuiltModel(
        module=module,
        inputs=inputs,
        preprocess=preset if two_towers or (len(inputs) == 1 and len(inputs[0].shape) == 3) else None,
        no_pictures=no_pictures,
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
    )


def _interpolate_positions(module: nn.Module) -> None:
    """Have each forward interpolate its position tables for pictures of other sizes; LoadError where it can't."""
    if INTERPOLATE not in inspect.signature(module.forward).parameters:
        detail = f"{type(module).__name__} has no {INTERPOLATE}"
        raise LoadError(detail, hint=f"leave {INTERPOLATE} out: it takes other sizes as it is, or none")
    module.forward = partial(module.forward, **{INTERPOLATE: True})


def _find_labels(config: Any) -> Labels | None:
    """The classes that config.json names; None where the library only numbers them."""
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    return None if names == [f"LABEL_{number}" for number in range(len(names))] else Labels(tuple(names), "config.json")


def _import_library() -> Any:
    # By name: read by a type checker, all of transformers takes minutes.
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise not_installed_error("transformers") from error
    logs = importlib.import_module("transformers.utils.logging")
    logs.set_verbosity_error()  # its warnings name directories
    logs.disable_progress_bar()
    return library


def _list_configured_parts(module: nn.Module) -> Iterator[Any]:
    """The module and everything in it that has a configuration."""
    return (part for part in module.modules() if hasattr(part, "config"))


def _set_plain_outputs(module: nn.Module) -> None:
    """Nothing is kept from call to call, nothing is returned beside what the model computes, no directory is known."""
    for part in _list_configured_parts(module):
        for name, value in PLAIN.items():
            if getattr(part.config, name, value) != value:
                setattr(part.config, name, value)
        if hasattr(part, "name_or_path"):
            part.name_or_path = ""


def _always_mask_attention(library: Any, module: Any, inputs: Sequence[InputSpec]) -> None:
    """Give attention a mask even where nothing is padded, as long as that changes no value.

    Left to itself the library leaves it out then, so that neighbours in a batch decide which arguments layers get, and
    which kernel runs. Some classes compute otherwise where their attention has another name, or a mask.
    """
    parts = [part for part in _list_configured_parts(module) if isinstance(part, library.PreTrainedModel)]
    if any(getattr(part.config, "_attn_implementation", None) != "sdpa" for part in parts):
        return
    if not all(part._can_set_attn_implementation() for part in parts):
        return
    if any('"sdpa"' in inspect.getsource(sys.modules[type(part).__module__]) for part in parts):
        return  # they ask for that name
    masks = importlib.import_module("transformers.masking_utils")

    def always_mask(*args: Any, **options: Any) -> Any:
        return masks.sdpa_mask(*args, **{**options, **dict.fromkeys(SKIPS, False)})

    library.AttentionInterface.register(MASKED, library.AttentionInterface()["sdpa"])
    library.AttentionMaskInterface.register(MASKED, always_mask)
    specs = [replace(spec, shape=(min(SHORT, spec.shape[0]),)) if spec.longest else spec for spec in inputs]
    row = make_noise_row(specs, module.device, module.dtype)
    run = partial(call_module, module=module.eval())
    # On one thread: a process that is copied after operations on several can use several no more.
    with torch.no_grad(), use_threads(1):
        alone = try_forward(run, row)
        module.set_attn_implementation(MASKED)
        if alone is not None and not has_same_values(alone, try_forward(run, row), TOLERANCE["bfloat16"]):
            module.set_attn_implementation("sdpa")


def _describe_settings(config: Any) -> str:
    """What the configuration says of the computation, as far as it is not as the library has it."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in IRRELEVANT}
    return json.dumps(settings, sort_keys=True, default=str)
