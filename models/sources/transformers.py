"""Models of the transformers library, which is an optional dependency, from a local directory.

Nothing is fetched, no code of the directory is run, nothing is unpickled.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from layertap.models.errors import LoadError, escape
from layertap.models.inputs.preprocess import compute_output_size, from_transformers
from layertap.models.inputs.text import TextSpec
from layertap.models.sources import transformers_switches
from layertap.models.sources.build import BuiltModel, wrap_build_errors
from layertap.models.sources.construction import isolate_construction
from layertap.models.sources.grammar import WeightsSource, get_base_name, not_installed_error, parse_weights
from layertap.models.sources.tokenizer import Tokenizer, load_tokenizer
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.models.weights.checkpoints import read_checkpoint
from layertap.models.weights.state_dict import format_names, has_same_values, load_state_dict, raise_for_different


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The model in the directory ``ident``: config.json, model.safetensors or its shards, tokenizer, preprocessor.

    Its class is the first of the configuration's ``architectures`` that transformers has, else AutoModel's. DEFAULT
    takes the directory's own weights. LoadError where transformers is not installed, the directory is not as it should
    be, weights are missing or do not fit, or what the model takes can't be told from its class.
    """
    library = _library()
    folder, shown = Path(ident), escape(f"transformers:{get_base_name(ident)}")
    if not (folder / "config.json").is_file():
        raise LoadError(f"there is no directory with a config.json for {shown}", hint=DIRECTORY_HINT)
    with wrap_build_errors(shown):
        config = library.AutoConfig.from_pretrained(str(folder), **LOCAL)
    if getattr(config, "fusion_config", None):
        detail = f"config.json of {shown} asks for fused layers, which would be put into other models too"
        raise LoadError(detail, hint="take fusion_config out of it")
    weights = parse_weights(spec.weights)
    module = _with_weights(library, folder, config, weights, shown)
    settings = _settings(config)
    _plain(module)
    tokenizer, text = None, None
    if spec.inputs is None and _takes(module) == TEXT:
        tokenizer = load_tokenizer(library, folder, shown, LOCAL)
        text = _text(module, tokenizer)
    preset = _preset(library, folder, shown) if spec.preprocess == "preset" else None
    inputs = spec.inputs or (text.inputs() if text else _inputs(module, preset, shown))
    if any(each.name == MASK for each in inputs):
        _always_masked(library, module)
    return BuiltModel(
        module=module,
        inputs=inputs,
        preprocess=preset if len(inputs) == 1 and len(inputs[0].shape) == 3 else None,
        architecture=f"transformers:{type(module).__name__}",
        prefix_tokens=int(tokenizer is not None and tokenizer.leads) or _class_tokens(module),
        weights="as saved" if weights.label == "DEFAULT" else weights.label,
        settings=settings,
        text=text,
    )


def _library() -> Any:
    # By name: read by a type checker, all of transformers takes minutes.
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise not_installed_error("transformers") from error
    logs = importlib.import_module("transformers.utils.logging")
    logs.set_verbosity_error()  # its warnings name directories
    logs.disable_progress_bar()
    transformers_switches.isolate()
    return library


def _with_weights(library: Any, folder: Path, config: Any, weights: WeightsSource, shown: str) -> Any:
    named = weights.seed is None and weights.path is None
    if named and weights.label != "DEFAULT":
        hint = "type DEFAULT, PATH.safetensors, PATH.pth or random:SEED"
        raise LoadError(f"{shown} has no weights named {escape(weights.label)}", hint=hint)
    if named:
        return _saved(library, folder, config, shown)
    state = read_checkpoint(weights.path) if weights.path else None
    with wrap_build_errors(shown), isolate_construction(weights.seed):
        made = _class(library, config)
        module = made(config) if made else library.AutoModel.from_config(config, trust_remote_code=False)
    if state is not None:
        load_state_dict(module, state, weights.label)
    return module


def _saved(library: Any, folder: Path, config: Any, shown: str) -> Any:
    """The module with the directory's weights: transformers would draw what is missing at random, and only warn."""
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise LoadError(f"{shown} holds no model.safetensors", hint=WEIGHTS_HINT)
    made = _class(library, config) or library.AutoModel
    options = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with wrap_build_errors(shown), isolate_construction(None):
        module, info = made.from_pretrained(str(folder), config=config, **options, **LOCAL)
    tied = _tied(module)
    wrong = {
        "missing": [escape(name) for name in sorted(info["missing_keys"]) if name not in tied],
        "of another shape": [escape(str(entry[0])) for entry in info["mismatched_keys"]],
        "unreadable": [escape(str(entry)) for entry in info["error_msgs"]],
    }
    said = "; ".join(f"{kind}: {format_names(names)}" for kind, names in wrong.items() if names)
    if said:
        raise LoadError(f"the weights of {shown} do not fit its config.json: {said}", hint=FIT_HINT)
    _detach(module)
    raise_for_different(_differing(module, folder), shown)
    return module


def _detach(module: Any) -> None:
    """Copy what lies in the file, which from_pretrained maps: who writes to it would change the model, or end us."""
    for value in (*module.parameters(), *module.buffers()):
        value.data = value.data.clone()


def _differing(module: Any, folder: Path) -> list[str]:
    """Names of the directory's tensors whose values the module does not hold, as far as they are its own.

    They are compared as the module would be saved: some models merge, split or rename what is in the file.
    """
    state = module.state_dict()
    with suppress(Exception):  # what a model does with them may be of a kind that is not undone
        state = importlib.import_module("transformers.core_model_loading").revert_weight_conversion(module, state)
    prefix, tied = f"{module.base_model_prefix}.", _tied(module)
    wrong = []
    for key, given in _tensors(folder):
        # A head's file may be read for its base, and the base's for its head.
        name = next((each for each in (key, prefix + key, key.removeprefix(prefix)) if each in state), None)
        if name is not None and name not in tied and not _kept(state[name], given, module.config.dtype):
            wrong.append(key)
    return wrong


def _kept(held: Tensor, given: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor has a file's values, rounded no further than to its model's dtype."""
    rounded = held.is_floating_point() and held.dtype.itemsize < FLOAT_BYTES and held.dtype != dtype
    return not held.is_meta and not rounded and has_same_values(held, given)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    whole, index = (folder / name for name in WEIGHTS)
    names = {whole.name} if whole.is_file() else set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    for name in sorted(names):
        with safe_open(folder / name, framework="pt") as file:
            yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118 - it is no dictionary


def _class(library: Any, config: Any) -> Any | None:
    """The class that wrote the directory, where it is one of the library's own models."""
    for name in (config.architectures or ())[:1]:
        found = getattr(library, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(found, type) and issubclass(found, library.PreTrainedModel):
            return found
    return None


def _tied(module: Any) -> dict[str, str]:
    """Parameters that the architecture itself declares to be others, by name."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


def _parts(module: nn.Module) -> Iterator[Any]:
    """The module and everything in it that has a configuration."""
    return (part for part in module.modules() if hasattr(part, "config"))


def _plain(module: nn.Module) -> None:
    """Nothing is kept from call to call, nothing is returned beside what the model computes, no directory is known."""
    for part in _parts(module):
        for name, value in PLAIN.items():
            if getattr(part.config, name, value) != value:
                setattr(part.config, name, value)
        if hasattr(part, "name_or_path"):
            part.name_or_path = ""


def _always_masked(library: Any, module: Any) -> None:
    """Give attention a mask even where nothing is padded.

    Left to itself the library leaves it out then, so that neighbours in a batch decide which arguments layers get, and
    which kernel runs.
    """
    parts = [part for part in _parts(module) if isinstance(part, library.PreTrainedModel)]
    if any(getattr(part.config, "_attn_implementation", None) != "sdpa" for part in parts):
        return
    if not all(part._can_set_attn_implementation() for part in parts):
        return
    masks = importlib.import_module("transformers.masking_utils")

    def whole(*args: Any, **options: Any) -> Any:
        return masks.sdpa_mask(*args, **{**options, **dict.fromkeys(SKIPS, False)})

    library.AttentionInterface.register(MASKED, library.AttentionInterface()["sdpa"])
    library.AttentionMaskInterface.register(MASKED, whole)
    module.set_attn_implementation(MASKED)


def _settings(config: Any) -> str:
    """What the configuration says of the computation, as far as it is not as the library has it."""
    told = {name: value for name, value in config.to_diff_dict().items() if name not in UNTOLD}
    return json.dumps(told, sort_keys=True, default=str)


def _arguments(module: Any) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters)


def _takes(module: Any) -> str:
    """What a model's class takes."""
    names, main = _arguments(module), module.main_input_name
    if names & FURTHER or hasattr(module.config, "num_frames"):
        return OTHER
    pictures = PIXELS in names and (main == PIXELS or hasattr(module.config, "vision_config"))
    if main == IDS and IDS in names:
        return BOTH if pictures else TEXT
    if pictures:
        return BOTH if IDS in names else PICTURES
    return OTHER


def _text(module: Any, tokenizer: Tokenizer | None) -> TextSpec:
    vocabulary = _vocabulary(module)
    config = module.config.get_text_config()
    pads = (tokenizer.pad if tokenizer else None, getattr(config, "pad_token_id", None))
    most = min(_positions(module, config), tokenizer.max_tokens if tokenizer else MOST_TOKENS)
    return TextSpec(
        ids=IDS,
        mask=MASK if MASK in _arguments(module) else None,
        max_tokens=most,
        pad=next((pad for pad in pads if isinstance(pad, int) and 0 <= pad < vocabulary), 0),
        vocabulary=vocabulary,
        encode=tokenizer.encode if tokenizer else None,
        digest=tokenizer.digest if tokenizer else "",
    )


def _vocabulary(module: Any) -> int:
    try:
        return int(module.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # of two towers, or a table of another kind
        return int(module.config.get_text_config().vocab_size)


def _positions(module: nn.Module, config: Any) -> int:
    """How many tokens there are positions for: some tables begin after the padding's."""
    most = getattr(config, "max_position_embeddings", None)
    found = [most] if isinstance(most, int) and most > 0 else [MOST_TOKENS]
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            found.append(part.num_embeddings - part.padding_idx - 1)
    return min(found)


def _inputs(module: Any, preset: PreprocessSpec | None, shown: str) -> tuple[InputSpec, ...]:
    takes = _takes(module)
    if takes not in (PICTURES, BOTH):
        detail = f"what {type(module).__name__} of {shown} takes can't be told from its class"
        raise LoadError(detail, hint=INPUTS_HINT)
    picture = InputSpec(PIXELS, _picture(module.config, preset, shown))
    return (*_text(module, None).inputs(), picture) if takes == BOTH else (picture,)


def _picture(config: Any, preset: PreprocessSpec | None, shown: str) -> tuple[int, ...]:
    sizes = (getattr(config, "vision_config", None), config)
    vision = next((each for each in sizes if getattr(each, "image_size", None) is not None), None)
    side = compute_output_size(preset) if preset else None
    side = side or (vision.image_size if vision is not None else None)
    if isinstance(side, int):
        side = (side, side)
    if not isinstance(side, (list, tuple)) or len(side) != 2:
        raise LoadError(f"config.json of {shown} has no image_size", hint=INPUTS_HINT)
    return (int(getattr(vision, "num_channels", 3) or 3), int(side[0]), int(side[1]))


def _preset(library: Any, folder: Path, shown: str) -> PreprocessSpec | None:
    if not (folder / "preprocessor_config.json").is_file():
        return None
    with wrap_build_errors(f"the preprocessing of {shown}"):
        return from_transformers(library.AutoImageProcessor.from_pretrained(str(folder), **LOCAL))


def _class_tokens(module: nn.Module) -> int:
    """Class, distillation and register tokens, by the names of their parameters."""
    found: dict[str, int] = {}
    for name, value in module.named_parameters():
        last = name.rpartition(".")[2]
        if last in TOKENS:
            found.setdefault(last, value.shape[-2] if value.ndim > 1 else 1)
    return sum(found.values())


IDS, MASK, PIXELS = "input_ids", "attention_mask", "pixel_values"
LOCAL = {"local_files_only": True, "trust_remote_code": False}
PICTURES, TEXT, BOTH, OTHER = "pictures", "text", "both", "other"
FURTHER = frozenset({"decoder_input_ids", "input_values", "input_features", "pixel_values_videos"})
TOKENS = frozenset({"cls_token", "class_embedding", "distillation_token", "register_tokens"})
PLAIN = {"use_cache": False, "return_dict": True, "output_hidden_states": False, "output_attentions": False}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
MASKED, SKIPS = "sdpa_always_masked", ("allow_is_causal_skip", "allow_is_bidirectional_skip")
UNTOLD = frozenset({"transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id", *PLAIN})
FLOAT_BYTES = 4
MOST_TOKENS = 512  # of a model that names no limit
DIRECTORY_HINT = "type transformers:PATH of what save_pretrained wrote; a relative PATH is beside the configuration"
WEIGHTS_HINT = "save it with save_pretrained, or give weights: PATH.safetensors or random:SEED"
FIT_HINT = "save the whole model with save_pretrained, or name the saved class in architectures of config.json"
INPUTS_HINT = "add inputs: name, shape and dtype of each"
