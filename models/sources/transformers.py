"""Models of the transformers library, which is an optional dependency, from a local directory.

Nothing is downloaded, no code in the directory is run, nothing is unpickled.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layertap.models.devices.devices import use_threads
from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape, format_names
from layertap.models.grammar import import_library, parse_weights, refuse_adapter
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.inputs.noise import make_noise_row
from layertap.models.inputs.sound import Media, SoundProcessor
from layertap.models.labels import Labels
from layertap.models.sources.build import (
    BuiltModel,
    Choice,
    construct_module,
    count_class_tokens,
    read_weights,
    refuse_named_weights,
    refuse_reserved_arguments,
    refuse_unknown_arguments,
)
from layertap.models.sources.checkpoints import LOCAL, find_weights, read_checkpoint, wrap_errors
from layertap.models.sources.cross_encoder import attach_scores, read_cross_encoder
from layertap.models.sources.sentence_folder import SentenceFolder, read_sentence_folder
from layertap.models.sources.sentence_model import LAYER, TOKENS, FinalEmbedding
from layertap.models.sources.sentence_texts import describe_texts
from layertap.models.sources.state_dict import (
    LoadReport,
    find_base,
    holds_values,
    merge_adapter,
    raise_for_different,
    read_head,
    read_task,
    refuse_scales,
)
from layertap.models.sources.transformers_generation import let_generate
from layertap.models.sources.transformers_inputs import MASK, read_inputs
from layertap.models.sources.transformers_sound import read_sound, takes_sound
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec

FLOAT_BYTES = 4
PLAIN = {"use_cache": False, "return_dict": True, "output_hidden_states": False, "output_attentions": False}
IRRELEVANT = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id", *PLAIN}
)
ALWAYS_MASK = "layertap_always_mask"  # of a module's configuration
NEVER_OMIT = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
TRIAL_TOKENS, MAX_DIFFERENCE = 5, 5e-2  # of a row with and without a mask, as a share of the largest value
LABELS, MULTI_LABEL = "num_labels", "multi_label_classification"
INTERPOLATE = "interpolate_pos_encoding"
OUTPUTS = ("classifier.weight", "score.weight", "out_proj.weight", "qa_outputs.weight")  # of a head over classes
HEADS = {"SEQ_CLS": "SEQUENCE_CLASSIFICATION", "TOKEN_CLS": "TOKEN_CLASSIFICATION", "CAUSAL_LM": "CAUSAL_LM"}  # PEFT's
ITS_OWN = "it says what the directory is: change its config.json"
RESERVED = {
    **dict.fromkeys(("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"), ITS_OWN),
    **dict.fromkeys(("dtype", "torch_dtype"), "type dtype: beside args:"),
    **dict.fromkeys(PLAIN, "the server decides what a forward returns"),
    "fusion_config": "leave it out: fused layers would be put into other models too",
}
SAVED = "what modules.json of the sentence-transformers folder makes"
DIRECTORY_HINT = "type transformers:PATH of what save_pretrained wrote; a relative PATH is beside the configuration"
MEAN = "mean over tokens or time: nothing that was saved with the model names an embedding"
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
    folder, shown = Path(ident), escape(spec.shown_source)
    adapter = Path(spec.adapter) if spec.adapter else None
    has_modules = adapter is not None and (adapter / "modules.json").is_file()  # those that it was trained beside
    sentence = (
        read_sentence_folder(adapter or folder, shown, folder) if has_modules else read_sentence_folder(folder, shown)
    )
    if sentence and sentence.tokenizing is None:
        return _build_without_transformer(sentence, shown)
    if sentence and not has_modules:
        folder = sentence.tokenizing.path
    if sentence or (folder / "config.json").is_file():
        folder, own_adapter = find_base(folder)
        adapter = adapter or own_adapter
    if not (folder / "config.json").is_file():
        refuse_adapter(folder)
        raise LoadError(f"there is no directory with a config.json for {shown}", hint=DIRECTORY_HINT)
    with wrap_errors(f"{shown} could not be built"):
        config = library.AutoConfig.from_pretrained(str(folder), **LOCAL)
        head, task = read_head(adapter), "" if sentence else read_task(adapter)
        widths = {len(value) for name, value in head.items() if name.endswith(OUTPUTS)}
        arguments = {LABELS: widths.pop(), **spec.args} if len(widths) == 1 and not sentence else spec.args
        if arguments:
            refuse_reserved_arguments(arguments, RESERVED, shown)
            refuse_unknown_arguments(arguments, [*config.to_dict(), LABELS], shown)
            config = library.AutoConfig.from_pretrained(str(folder), **{**arguments, **LOCAL})
        architecture = _find_architecture(library, config, sentence, task)
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
        module, report = _load_saved(architecture, folder, config, spec, shown, head)
    else:
        construct = partial(architecture, config)
        module, report = construct_module(spec, shown, construct, read_weights(spec), classes=LABELS)
    if adapter and not (report and report.adapter) and (weights.is_named or sentence):
        merge_adapter(module, adapter)  # before the other modules are there, which were not adapted
        report = replace(report or LoadReport(), adapter=adapter.name)
    # The settings that affect results and differ from the library's defaults.
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in IRRELEVANT}
    described = json.dumps(settings, sort_keys=True, default=str)
    all_layers = bool(getattr(config, "output_hidden_states", False))
    _set_plain_outputs(module)
    own = sentence.tokenizing.path if sentence else folder
    media: Media | str
    if spec.inputs is None and takes_sound(module):
        (inputs, media), text, two_towers = read_sound(library, module, folder, shown), None, False
    else:
        inputs, text, media, two_towers = read_inputs(library, module, own, spec, sentence, shown)
    if spec.interpolate_pos_encoding:
        if INTERPOLATE not in inspect.signature(module.forward).parameters:
            detail = f"{type(module).__name__} has no {INTERPOLATE}"
            raise LoadError(detail, hint=f"leave {INTERPOLATE} out: it takes other sizes as it is, or none")
        module.forward = partial(module.forward, **{INTERPOLATE: True})
    if any(each.name == MASK for each in inputs) and not isinstance(media, SoundProcessor):
        _always_mask(library, module, text.inputs() if text else inputs)
    if sentence:
        vocabulary = text.vocabulary if text else 0
        sentence.attach(module, shown, all_layers=all_layers, vocabulary=vocabulary, two_towers=two_towers)
        described += sentence.describe()
    elif text and not two_towers and (scores := read_cross_encoder(folder, config, shown)):
        attach_scores(module, scores)
        text = scores.complete(text)
        inputs, described = text.inputs(), described + scores.describe()
    elif text and not two_towers and not text.types and spec.inputs is None:
        with wrap_errors(f"generation_config.json of {shown} could not be read"):
            text = replace(text, stop=let_generate(library, module, folder))
    labels = tuple(str(name) for _, name in sorted((config.id2label or {}).items()))
    is_numbered = labels == tuple(f"LABEL_{number}" for number in range(len(labels)))  # by the library's default
    return BuiltModel(
        module=module,
        inputs=inputs,
        media=media,
        architecture=f"transformers:{type(module).__name__}",
        prefix_tokens=0 if text and not two_towers else count_class_tokens(module),
        weights="as saved" if weights.label == "DEFAULT" else weights.label,
        named=True,
        settings=described,
        text=text,
        report=report,
        labels=None if is_numbered else Labels(labels, "config.json"),
        embeddings=_choose_embedding(sentence) if sentence else [],
        two_towers=two_towers,
        outputs="multi_label_logits" if getattr(config, "problem_type", None) == MULTI_LABEL else None,
    )


def _build_without_transformer(sentence: SentenceFolder, shown: str) -> BuiltModel:
    """A folder whose modules read ids themselves."""
    module, text = describe_texts(sentence, shown)
    return BuiltModel(
        module=module,
        inputs=text.inputs(),
        architecture=f"sentence-transformers:{'+'.join(type(part).__name__ for part in sentence.parts.values())}",
        weights="as saved",
        named=True,
        settings=sentence.describe(),
        text=text,
        embeddings=_choose_embedding(sentence),
    )


def _choose_embedding(sentence: SentenceFolder) -> list[Choice]:
    is_vector = isinstance(sentence.final, FinalEmbedding)
    return [(EmbeddingSpec(LAYER) if is_vector else EmbeddingSpec(TOKENS, "none"), SAVED, False)]


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


def _always_mask(library: Any, module: Any, inputs: Sequence[InputSpec]) -> None:
    """Give attention a mask even if nothing is padded, unless that changes the model's values.

    By default the library omits a mask of ones, so that the other rows of a batch decide which kernel runs.
    """
    configs = [part.config for part in module.eval().modules() if isinstance(part, library.PreTrainedModel)]
    if any(getattr(config, "_attn_implementation", None) != "sdpa" for config in configs):
        return  # another kernel always runs; and some of these models change for good at a short text
    masks = importlib.import_module("transformers.masking_utils")
    masks.AttentionMaskInterface.register("sdpa", partial(_make_mask, masks.sdpa_mask))
    specs = [replace(spec, shape=(min(TRIAL_TOKENS, spec.shape[0]),)) if spec.longest else spec for spec in inputs]
    row = make_noise_row(specs, module.device, module.dtype)

    def run(*, always: bool) -> list[Tensor]:
        for config in configs:
            setattr(config, ALWAYS_MASK, always)
        return [value for _, value in iterate_tensors(module(**row)) if value.is_floating_point()]

    # On one thread: a process that forks after multithreaded operations can't use several threads in the child.
    with torch.no_grad(), use_threads(1), suppress(Exception):  # what always raises, raises again in the survey
        if all(map(_is_near, run(always=False), run(always=True))):
            return
    for config in configs:
        setattr(config, ALWAYS_MASK, False)


def _is_near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=MAX_DIFFERENCE * float(one.abs().max()), equal_nan=True)


def _make_mask(make: Callable[..., Tensor | None], *args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The library's mask, which a model's ``config`` can forbid it to omit."""
    return make(*args, config=config, **options | (NEVER_OMIT if getattr(config, ALWAYS_MASK, False) else {}))


def _load_saved(
    architecture: Any, folder: Path, config: Any, spec: ModelSpec, shown: str, head: Container[str]
) -> tuple[Any, LoadReport]:
    """The module with the directory's weights. LoadError if they do not fit: transformers would only warn.

    What an adapter has whole, its ``head``, may be missing.
    """
    file = find_weights(folder)  # read by our own code: the library gets tensors, never a pickle
    # For any other dtype the library would change the process's default dtype while it constructs the module.
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with wrap_errors(f"{shown} could not be built"), construct_alone(None if spec.strict else 0):
        state = read_checkpoint(file)
        module, info = architecture.from_pretrained(None, config=config, state_dict=state, **options, **LOCAL)
    missing, pooler = info["missing_keys"], {name for name in module.state_dict() if name.startswith("pooler.")}
    if pooler and pooler <= missing and "add_pooling_layer" in inspect.signature(type(module)).parameters:
        module.pooler = None  # it was saved without one
        missing -= pooler
    missing = tuple(name for name in sorted(missing) if name not in module.all_tied_weights_keys and name not in head)
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
    return module, LoadReport("", "", missing, left_over)


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
        held, allowed = state[name], [given]
        if name in padding:
            padded = given.clone()
            padded[padding[name] : padding[name] + 1] = 0
            allowed.append(padded)
        # It may be rounded to the model's own dtype only.
        rounded = held.is_floating_point() and held.dtype.itemsize < FLOAT_BYTES and held.dtype != module.config.dtype
        if held.is_meta or rounded or not any(holds_values(held, each) for each in allowed):
            wrong.append(key)
    return wrong


def _find_architecture(library: Any, config: Any, sentence: SentenceFolder | None, task: str) -> Any:
    """The class that wrote the directory if it is one of the library's own models, else AutoModel's.

    For the ``task`` of an adapter it is the class with the head that PEFT trains for it.

    For a ``sentence`` folder it is AutoModel's, unless the library has a class without the decoder (T5EncoderModel), or
    AutoModelForMaskedLM's.
    """
    name = next(iter(config.architectures or ()), None)
    if task in HEADS:
        models = getattr(library, f"MODEL_FOR_{HEADS[task]}_MAPPING")
        return importlib.import_module("transformers.models.auto.auto_factory")._get_model_class(config, models)
    if sentence:
        name = type(config).__name__.replace("Config", "EncoderModel")
    found = getattr(library, name, None) if isinstance(name, str) and name.isidentifier() else None
    masked = sentence is not None and sentence.is_masked
    if isinstance(found, type) and issubclass(found, library.PreTrainedModel) and not masked:
        return found
    # AutoModel itself would search for adapters beside the weights, even if it is given tensors.
    return importlib.import_module("transformers.models.auto.auto_factory")._get_model_class(
        config, library.MODEL_FOR_MASKED_LM_MAPPING if masked else library.MODEL_MAPPING
    )


def find_embeddings(module: Any, row: Tensor) -> tuple[list[Choice], bool]:
    """As ``find_known_embeddings``: embeddings that a model returns by name, or a guess for texts."""
    name = type(module).__name__
    if "Classification" in name:
        return [], True
    text = module.main_input_name == "input_ids"
    keys = ["text_embeds", "image_embeds", "audio_embeds"]
    if not text or not hasattr(module, "pooler"):  # BERT's pooler was trained for another task
        keys.append("pooler_output")
    choices = [(EmbeddingSpec(f".[{key}]"), f"{name} returns it as {key}", False) for key in keys]
    if text or takes_sound(module):
        layers = filter(None, (".", module.base_model_prefix))
        choices += [(EmbeddingSpec(f"{layer}[last_hidden_state]", "mean"), MEAN, True) for layer in layers]
    return choices, False
