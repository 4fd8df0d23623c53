"""Models of open_clip, which is an optional dependency, from a local folder with an ``open_clip_config.json``.

Nothing is downloaded, no code in the folder is run, nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor, nn

from layertap.models.errors import InputError, LoadError, escape, format_names
from layertap.models.grammar import import_library, parse_weights
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.inputs.presets import choose_preprocessing
from layertap.models.sources.build import (
    FLOAT_BITS,
    BuiltModel,
    Choice,
    construct_module,
    count_class_tokens,
    read_weights,
    refuse_named_weights,
    refuse_unknown_arguments,
)
from layertap.models.sources.checkpoints import LOCAL, find_weights, read_checkpoint, wrap_errors
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec, PreprocessSpec, Truncate

CONFIG = "open_clip_config.json"
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")
FOLDER_HINT = (
    "type open_clip:PATH of what open_clip's push_to_hf_hub wrote; a relative PATH is beside the configuration"
)
PICTURE, TEXT = "image", "text"
TOKENIZER_OPTIONS = frozenset(
    {"clean", "strip_sep_token", "additional_special_tokens"}
)  # others would be its library's
MAX_WORDS = 2**16  # that open_clip's own tokenizer keeps, for ever
EMBEDDING = EmbeddingSpec("."), "what encode_image and encode_text return", False


def build(ident: str, spec: ModelSpec) -> BuiltModel:
    """The model in the folder ``ident``, which takes a text or a picture; DEFAULT is the folder's own weights.

    LoadError if open_clip is not installed or did not write the folder, a file is missing, or weights do not fit.
    """
    library = import_library("open_clip")
    folder, shown = Path(ident), escape(spec.shown_source)
    refuse_unknown_arguments(spec.args, [], shown)
    config, transform = _read_config(folder, shown)
    weights = parse_weights(spec.weights)
    refuse_named_weights(weights, shown)
    file = find_weights(folder, FILES) if weights.is_named else None
    state = read_checkpoint(file) if file else read_weights(spec)
    module, report = construct_module(spec, shown, partial(_construct, library, config), state, FLOAT_BITS)
    size = module.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    with wrap_errors(f"the tokenizer of {shown} could not be built"):
        text = _read_text_spec(folder, config["text_cfg"], module)
    return BuiltModel(
        module=module,
        inputs=(
            InputSpec(TEXT, (text.max_tokens,), "int64", values=(0, text.vocabulary)),
            InputSpec(PICTURE, (3, int(height), int(width))),
        ),
        media=_read_transform({**transform, "size": (int(height), int(width))}),
        architecture=f"open_clip:{type(module).__name__}",
        weights="as saved" if file else weights.label,
        prefix_tokens=_count_prefix(module.visual),
        named=True,
        settings=json.dumps(config, sort_keys=True),
        text=text,
        report=report,
        embeddings=[EMBEDDING],
        two_towers=True,
    )


def find_embeddings(module: nn.Module, row: Tensor) -> tuple[list[Choice], bool]:
    """As ``find_known_embeddings``; a model that a caller has made returns its embeddings in a tuple."""
    del module, row
    return [], False


def _read_config(folder: Path, shown: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model and the transform in a folder's file; LoadError if it has none, or names what would be downloaded."""
    try:
        read = json.loads((folder / CONFIG).read_text("utf-8"))
        config, transform = dict(read["model_cfg"]), dict(read.get("preprocess_cfg") or {})
        text, vision = dict(config["text_cfg"]), dict(config["vision_cfg"])
        options = dict(text.get("tokenizer_kwargs") or {})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LoadError(f"there is no {CONFIG} of {shown} that can be read", hint=FOLDER_HINT) from error
    elsewhere = "the folder does not hold it; a copy that is converted for transformers does: type transformers:PATH"
    if text.get("hf_model_name"):
        name = escape(str(text["hf_model_name"]))
        raise LoadError(f"the text tower of {shown} is {name}, whose configuration is on the hub", hint=elsewhere)
    trunk = vision.get("timm_model_name")
    if trunk and not import_library("timm").is_model(trunk):
        raise LoadError(f"timm has no architecture {escape(str(trunk))}, of which {shown} makes pictures' vectors")
    if unknown := [f"tokenizer_kwargs/{name}" for name in options if name not in TOKENIZER_OPTIONS]:
        raise LoadError(f"{CONFIG} of {shown} has options that are not taken: {format_names([*map(escape, unknown)])}")
    if text.get("tokenizer_mode"):
        raise LoadError(f"{CONFIG} of {shown} has a tokenizer_mode, which is not taken")
    vision["timm_model_pretrained"] = False
    return {**config, "text_cfg": text, "vision_cfg": vision}, transform


def _construct(library: Any, config: Mapping[str, Any]) -> Any:
    """The module, whose forward takes a text or a picture alone, and then returns its vector as it was trained."""
    fields = {name: value for name, value in config.items() if name != "custom_text"}
    own_text = library.CoCa if "multimodal_cfg" in config else library.CustomTextCLIP
    whole = own_text if config.get("custom_text") else library.CLIP
    module = whole(**fields)
    module.output_dict = True  # both towers together

    def forward(self: Any, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        if image is not None and not image.is_floating_point():  # a single input is passed by position
            image, text = None, image
        if image is None:
            return self.encode_text(text, normalize=False)
        return self.encode_image(image, normalize=False) if text is None else whole.forward(self, image, text)

    module.__class__ = type(whole.__name__, (whole,), {"forward": forward, "__module__": whole.__module__})
    return module


def _count_prefix(visual: Any) -> int:
    trunk = getattr(visual, "trunk", None)
    return count_class_tokens(visual) if trunk is None else int(getattr(trunk, "num_prefix_tokens", 0) or 0)


def _read_transform(settings: Mapping[str, Any]) -> Preprocessing | str:
    """The folder's own transform as preprocessing; a text with the reason if it takes no pictures."""
    transforms = import_module("open_clip.transform")
    try:
        config = transforms.PreprocessCfg(**transforms.merge_preprocess_dict(transforms.PreprocessCfg(), settings))
        transform = transforms.image_transform_v2(config, is_train=False)
    except Exception as error:
        return f"open_clip makes no transform of its preprocess_cfg ({type(error).__name__})"
    height, width = config.size
    mean, std = (tuple(each) if isinstance(each, (list, tuple)) else (each,) * 3 for each in (config.mean, config.std))
    squash = config.resize_mode == "squash"
    nearest = None
    if squash or (config.resize_mode == "shortest" and height == width):
        sides = (height, width) if squash else height
        nearest = PreprocessSpec(sides, None if squash else height, mean, std, config.interpolation)
    described = json.dumps(vars(config), sort_keys=True)
    return choose_preprocessing("image_transform", described, transform, nearest, "open_clip's transform")


def _read_text_spec(folder: Path, config: Mapping[str, Any], module: Any) -> TextSpec:
    """How the model takes texts: its own tokenizer pads each to the context, and cuts what is longer at its end."""
    tokenizers = import_module("open_clip.tokenizer")
    options, context = dict(config.get("tokenizer_kwargs") or {}), int(config.get("context_length") or 77)
    if config.get("hf_tokenizer_name"):
        import_library("transformers")
        import_module("transformers.utils.logging").set_verbosity_error()  # its warnings contain directories
        tokenizer = tokenizers.HFTokenizer(str(folder), context_length=context, **options, **LOCAL)
        whole = tokenizer.tokenizer
        words = whole.backend_tokenizer.to_str() if whole.is_fast else repr(sorted(whole.get_vocab().items()))
        pad, state = whole.pad_token_id or 0, f"{type(whole).__name__} {whole.padding_side} {words}"
        count: Any = partial(_count_library_tokens, tokenizer)
    else:
        tokenizer = tokenizers.SimpleTokenizer(context_length=context, **options)
        pad, state, count = 0, "SimpleTokenizer", partial(_count_own_tokens, tokenizer, dict(tokenizer.cache))
    digest = hashlib.sha256(f"{state} {sorted(options.items())}".encode()).hexdigest()
    return TextSpec(
        ids=TEXT,
        mask=None,
        max_tokens=context,
        pad=pad,
        vocabulary=int(config.get("vocab_size") or 49408),
        is_fast=False,
        encode=partial(_encode, tokenizer, count, Lock()),
        digest=digest,
        truncate="end",
    )


def _encode(tokenizer: Any, count: Any, lock: Lock, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    if truncate == "start":
        raise InputError("open_clip cuts texts at their end only", hint='send "truncate": "end"')
    with lock:  # they keep state between calls
        excess = max(count(text) - limit, 0)
        if excess and truncate == "none":
            return [0] * (limit + excess), 0  # which is refused for its length
        ids: list[int] = tokenizer([text])[0].tolist()
        return ids, excess


def _count_library_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer.tokenizer(tokenizer.clean_fn(text)).input_ids)


def _count_own_tokens(tokenizer: Any, words: dict[str, str], text: str) -> int:
    if len(tokenizer.cache) > MAX_WORDS:
        tokenizer.cache = dict(words)
    return len(tokenizer.encode(text)) + len(("start", "end"))
