"""The inputs of a transformers model: tokens, pictures or both, read from its class and its directory."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.inputs.model_inputs import Encode, TextSpec
from layertap.models.inputs.preprocess import LibraryProcessor, Preprocessing
from layertap.models.inputs.presets import SIDE, choose_preprocessing, from_transformers
from layertap.models.inputs.video import VideoProcessor
from layertap.models.sources.checkpoints import LOCAL, wrap_errors
from layertap.models.sources.sentence_folder import SentenceFolder
from layertap.models.sources.sentence_texts import complete_texts, encodes_itself, list_limits
from layertap.models.spec import ImageBackend, InputSpec, ModelSpec, Truncate

Modality = Literal["pictures", "text", "both", "other"]
IDS, MASK, TYPES, PIXELS = "input_ids", "attention_mask", "token_type_ids", "pixel_values"
PATCH_SHAPES = "spatial_shapes"
CLIPS = "pixel_values_videos"
FURTHER = frozenset({"decoder_input_ids", "input_values", "input_features", CLIPS})
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
OF_VIDEOS = "video_preprocessor_config.json"
# Where the configuration of a known class of videos, by its model_type, says how many frames it takes.
FRAMES = {
    **dict.fromkeys(("videomae", "vivit", "timesformer"), "num_frames"),
    "vjepa2": "frames_per_clip",
    "xclip": "vision_config.num_frames",
}
SIDES: dict[str, Truncate] = {"left": "start", "right": "end"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"),
)
TABLES = ("position_embedding", "position_embeddings")
DEFAULT_MAX_TOKENS = 512  # for a model without a limit
CODE_POINTS = 0x110000  # Unicode's: the ids of a model without a vocabulary, CANINE
INPUTS_HINT = "add inputs: name, shape and dtype of each"


def read_inputs(
    library: Any, module: Any, folder: Path, spec: ModelSpec, sentence: SentenceFolder | None, shown: str
) -> tuple[tuple[InputSpec, ...], TextSpec | None, Preprocessing | VideoProcessor | str, bool]:
    """A model's inputs, how it takes texts and pictures or videos, and whether it has two towers that run alone.

    The forward of such a model is changed to accept either's inputs. LoadError if its class does not tell its inputs.
    """
    names = inspect.signature(module.forward).parameters
    modality = _find_modality(module, names) if spec.inputs is None else "other"
    two_towers = modality in ("text", "both") and _split_towers(module) and modality == "both"
    pairs = modality == "text" and sentence is None
    text = None
    if modality == "text" or two_towers:
        text = _read_text_spec(library, module, folder, shown, sentence, pairs=pairs)
    pictures: Preprocessing | VideoProcessor | str = ""
    frames = count_frames(module) if spec.inputs is None else None
    if modality == "text" and PATCH_SHAPES in names:
        pictures = f"{type(module).__name__} takes them in patches, with {PATCH_SHAPES}"
    elif spec.preprocess == "preset" and modality != "text":
        backend = "pil" if spec.image_backend == "auto" and spec.decode != "exact" else spec.image_backend
        pictures = read_preset(library, folder, backend, frames)
    if spec.inputs is not None:
        inputs = spec.inputs
    elif modality == "text" and text is not None:
        inputs = text.inputs()
    elif modality == "other":
        detail = f"what {type(module).__name__} of {shown} takes can't be told from its class"
        raise LoadError(detail, hint=INPUTS_HINT)
    else:
        shape = _get_picture_shape(module.config, pictures, shown)
        picture = (
            InputSpec(PIXELS, shape)
            if frames is None
            else InputSpec(CLIPS if CLIPS in names else PIXELS, (frames, *shape))
        )
        words = text or _read_text_spec(library, module, None, shown) if modality == "both" else None
        inputs = (*(words.inputs() if words else ()), picture)
    takes_pictures = two_towers or (len(inputs) == 1 and (len(inputs[0].shape) == 3 or frames is not None))
    return inputs, text, pictures if isinstance(pictures, str) or takes_pictures else "", two_towers


def _read_text_spec(
    library: Any,
    module: Any,
    folder: Path | None,
    shown: str,
    sentence: SentenceFolder | None = None,
    *,
    pairs: bool = False,
) -> TextSpec:
    """How a model takes texts; only ids without a directory that has a tokenizer, or if that needs token types.

    A sentence-transformers folder has its own tokenizer; texts are truncated to its limit or the model's positions. If
    the tokenizer returns no mask, and its limit is the size of a position table, texts are padded to it, as by SigLIP's
    processor.
    """
    names, config = inspect.signature(module.forward).parameters, module.config.get_text_config()
    try:
        vocabulary = int(module.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # it has two towers, or another kind of table
        vocabulary = int(getattr(config, "vocab_size", None) or CODE_POINTS)
    # How many tokens have positions; some tables begin after the padding's index.
    positions = getattr(config, "max_position_embeddings", None)
    sizes = [positions if isinstance(positions, int) and positions > 0 else DEFAULT_MAX_TOKENS]
    tables = [part for name, part in module.named_modules() if name.endswith(TABLES)]
    for each in tables:
        if isinstance(each, nn.Embedding) and each.padding_idx is not None:
            sizes.append(each.num_embeddings - each.padding_idx - 1)
    with wrap_errors(f"the tokenizer of {shown} could not be built"):
        whole = _load_tokenizer(library, folder, shown, sentence) if folder is not None else None
        limit, pads = DEFAULT_MAX_TOKENS, [getattr(config, "pad_token_id", None)]
        if whole is not None:
            limit = max(int(whole.model_max_length), *(list_limits(sentence).values() if sentence else ()), 0)
            pads.insert(0, whole.pad_token_id)
        text = TextSpec(
            ids=IDS,
            mask=MASK if MASK in names else None,
            max_tokens=min(*sizes, limit),
            pad=next((pad for pad in pads if isinstance(pad, int) and 0 <= pad < vocabulary), 0),
            vocabulary=vocabulary,
            pads=not any(getattr(part, "rope_type", None) == "longrope" for part in module.modules()),
        )
        kinds = getattr(config, "type_vocab_size", None)
        if pairs and TYPES in names and kinds is not None and kinds > 1:
            text = replace(text, types=TYPES, kinds=kinds)
        if whole is None:
            return text
        text = replace(text, decode=partial(whole.decode, skip_special_tokens=True))
        has_limit = hasattr(config, "max_position_embeddings") or text.max_tokens == limit
        if not whole.is_fast:
            settings = {name: value for name, value in whole.init_kwargs.items() if str(folder) not in str(value)}
            digest = _digest(repr((type(whole).__name__, sorted(settings.items()), whole.get_vocab())))
            slow: Encode = partial(_encode_slowly, whole, Lock())
            text = replace(text, encode=slow, is_fast=False, digest=digest)
            return complete_texts(text, sentence, slow) if sentence else text
        # A copy: the library's wrapper sets truncation and padding at each call, which is not thread-safe.
        own = type(whole.backend_tokenizer).from_str(whole.backend_tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        encode: Encode = partial(_encode, own)
        is_trained = any(getattr(each, "num_embeddings", 0) == text.max_tokens for each in tables)
        if MASK not in whole.model_input_names and text.mask and is_trained and sentence is None:
            encode = partial(_encode_and_fill, own, whole.padding_side, whole.pad_token_id or 0)
        has_chat = sentence is None and bool(whole.chat_template)
        typed = TYPES in names and TYPES in whole.model_input_names
        single = whole("a")["input_ids"].count(whole.sep_token_id)
        has_several = TYPES in names and any(whole("a", "a").get(TYPES, ()))
        # Without a table of types GPT-2 takes those of words; one of a single type has none for second texts.
        is_refused = typed and (kinds is None or (kinds == 1 and has_several))
        text = replace(
            text,
            encode=encode,
            encode_pair=partial(_encode_pair, own, typed) if pairs and not is_refused else None,
            encode_chat=partial(_encode_chat, whole, own) if has_chat else None,
            digest=_digest(own.to_str() + (str(whole.chat_template) if sentence or has_chat else "")),
            is_fast=sentence is None or not encodes_itself(sentence),
            truncate=SIDES[whole.truncation_side] if sentence is not None and has_limit else "none",
            side=SIDES[whole.truncation_side],
            separators=(whole.sep_token_id, single) if single and has_several else None,
        )
        return complete_texts(text, sentence, encode) if sentence else text


def _load_tokenizer(library: Any, folder: Path, shown: str, sentence: SentenceFolder | None) -> Any | None:
    """The library's tokenizer of a directory; None if there is none that can be used, LoadError for a broken one."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    tokenizing = sentence.tokenizing.tokenizer if sentence else None
    whole = tokenizing or library.AutoTokenizer.from_pretrained(str(folder), **LOCAL)
    if whole.vocab_size <= len(whole.all_special_tokens) + 1:  # the last may be a mark of spaces
        detail = f"the tokenizer of {shown} knows {whole.vocab_size} ids, and no word: its vocabulary is missing"
        files = " or ".join(sorted(whole.vocab_files_names.values()))
        raise LoadError(detail, hint=f"put {files} into the folder, as save_pretrained wrote it")
    needs_types = any(whole("a").get(TYPES, ()))  # they are not supported; requests can send ids
    return None if needs_types else whole


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(own: Any, text: str, limit: int, truncate: Truncate, *, specials: bool = True) -> tuple[list[int], int]:
    encoding = own.encode(text, add_special_tokens=False)
    kept = limit - (own.num_special_tokens_to_add(False) if specials else 0)
    excess = 0 if truncate == "none" else max(len(encoding.ids) - kept, 0)
    if excess:
        encoding.truncate(kept, direction="left" if truncate == "start" else "right")
    return (own.post_process(encoding) if specials else encoding).ids, excess


def _encode_pair(
    own: Any, typed: bool, first: str, second: str, limit: int, truncate: Truncate
) -> tuple[list[int], list[int] | None, int]:
    """Ids, token types if they are ``typed``, and the number of dropped tokens; thread-safe.

    ``own`` is a fast tokenizer that neither cuts nor pads.
    """
    pair = [own.encode(text, add_special_tokens=False) for text in (first, second)]
    lengths = [len(each.ids) for each in pair]
    kept = lengths
    if truncate != "none":
        kept = _cut_longest(lengths[0], lengths[1], limit - own.num_special_tokens_to_add(True))
    for each, length in zip(pair, kept, strict=True):
        each.truncate(length, direction="left" if truncate == "start" else "right")
    whole = own.post_process(*pair)
    # Each was encoded as a first text; post-processors set the types of a second one.
    types = whole.type_ids if own.post_processor is not None else [0] * kept[0] + [1] * kept[1]
    return whole.ids, types if typed else None, sum(lengths) - sum(kept)


def _cut_longest(first: int, second: int, limit: int) -> list[int]:
    """What is left of two texts by ``longest_first``: the longer one loses tokens until both are equally long."""
    short, long = sorted((first, second))
    if short + long > limit:
        long = max(short, limit - short)
        if short + long > limit:
            short, long = limit // 2, limit - limit // 2
    return [short, long] if first <= second else [long, short]


def _encode_chat(
    whole: Any, own: Any, messages: Sequence[Mapping[str, str]], limit: int, truncate: Truncate
) -> tuple[list[int], int]:
    """The folder's template, which the library runs in a sandbox, writes special tokens itself."""
    text = whole.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return _encode(own, text, limit, truncate, specials=False)


def _encode_and_fill(own: Any, side: str, pad: int, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    ids, excess = _encode(own, text, limit, truncate)
    pads = [pad] * (limit - len(ids))
    return (pads + ids if side == "left" else ids + pads), excess


def _encode_slowly(whole: Any, lock: Lock, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    with lock:  # a tokenizer in Python may keep state between calls
        ids: list[int] = whole(text)["input_ids"]
        excess = len(ids) - limit
        if excess <= 0 or truncate == "none":
            return ids, 0
        whole.truncation_side = "left" if truncate == "start" else "right"
        return whole(text, truncation=True, max_length=limit)["input_ids"], excess


def _find_modality(module: Any, names: Container[str]) -> Modality:
    """The kind of input that a model's class takes, whose forward has parameters of these ``names``."""
    if count_frames(module) is not None:
        return "both" if IDS in names else "pictures"
    if any(name in names for name in FURTHER) or hasattr(module.config, "num_frames"):
        return "other"
    main, pixels = module.main_input_name, PIXELS in names and PATCH_SHAPES not in names
    pictures = pixels and (main == PIXELS or hasattr(module.config, "vision_config"))
    if main == IDS and IDS in names:
        return "both" if pictures else "text"
    if pictures:
        return "both" if IDS in names else "pictures"
    return "other"


def count_frames(module: Any) -> int | None:
    """How many frames of a video a model takes; None if it is of no known class of videos."""
    field = FRAMES.get(module.config.model_type)
    return int(attrgetter(field)(module.config)) if field is not None else None


def _split_towers(module: Any) -> bool:
    """Whether a model has towers of texts and pictures, or videos; if so its forward is changed to accept either alone.

    For one tower it returns ``get_text_features``, or ``get_image_features`` or ``get_video_features``.
    """
    whole = type(module)
    get_features = getattr(whole, "get_image_features" if count_frames(module) is None else "get_video_features", None)
    if not hasattr(whole, "get_text_features") or get_features is None:
        return False

    @wraps(whole.forward)
    def forward(self: Any, *single: Any, **rows: Any) -> Any:
        if single:  # a single input is passed by position
            rows[PIXELS if single[0].is_floating_point() else IDS] = single[0]
        if PIXELS not in rows:
            return self.get_text_features(**{name: value for name, value in rows.items() if name in (IDS, MASK)})
        return whole.forward(self, **rows) if IDS in rows else get_features(self, **rows)

    module.__class__ = type(whole.__name__, (whole,), {"forward": forward, "__module__": whole.__module__})
    return True


def _get_picture_shape(config: Any, pictures: Preprocessing | VideoProcessor | str, shown: str) -> tuple[int, ...]:
    configs = (getattr(config, "vision_config", None), config)
    vision = next((each for each in configs if getattr(each, "image_size", None) is not None), None)
    pictures = pictures.of_frame if isinstance(pictures, VideoProcessor) else pictures
    side: Any = None if isinstance(pictures, str) else pictures.output_size
    side = side or (vision.image_size if vision is not None else None)
    if side is None and isinstance(pictures, LibraryProcessor):  # rows are as large as pictures: take any size
        side = list(pictures.make_row(Image.new("RGB", (SIDE, SIDE))).shape[1:])
    if isinstance(side, int):
        side = (side, side)
    if not isinstance(side, (list, tuple)) or len(side) != 2:
        raise LoadError(f"config.json of {shown} has no image_size", hint=INPUTS_HINT)
    return (int(getattr(vision, "num_channels", 3) or 3), int(side[0]), int(side[1]))


def read_preset(
    library: Any, folder: Path, backend: ImageBackend, frames: int | None = None
) -> Preprocessing | VideoProcessor | str:
    """The preprocessing saved in a directory; a text with the reason if pictures, or videos, can't be taken.

    Uses the requested ``backend`` of the library, or the other one if the processor has only that. For a model of so
    many ``frames``, the processor of videos, if one was saved, else that of pictures.
    """
    files = (*([OF_VIDEOS] if frames is not None else []), *PROCESSOR_FILES)
    file = next((name for name in files if (folder / name).is_file()), None)
    if file is None:
        return f"its folder has no {PROCESSOR_FILES[0]}"
    try:
        wanted = {} if backend == "auto" or file == OF_VIDEOS else {"backend": backend}
        auto = library.AutoVideoProcessor if file == OF_VIDEOS else library.AutoImageProcessor
        processor = auto.from_pretrained(str(folder), **wanted, **LOCAL)
        settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    except Exception as error:  # the library has no processor for this version or model
        return f"image_processor_type of {file} names none that transformers can make ({type(error).__name__})"
    name, nearest = type(processor).__name__, None
    with suppress(TypeError, ValueError, AttributeError):  # unknown settings
        nearest = from_transformers(processor)
    shown = f"{name}, which image_processor_type of {file} names,"
    if frames is None:
        return choose_preprocessing(name, settings, partial(_run_processor, processor), nearest, shown)
    found = choose_preprocessing(name, settings, partial(_run_on_frame, processor), None, shown)
    return found if isinstance(found, str) else VideoProcessor(name, found, frames)


def _run_processor(processor: Any, image: Image.Image) -> Tensor:
    rows: Tensor = processor(images=image, return_tensors="pt")[PIXELS]
    return rows[0] if len(rows) == 1 else rows


def _run_on_frame(processor: Any, image: Image.Image) -> Tensor:
    """A frame as a video of one frame."""
    options = {"do_sample_frames": False} if hasattr(processor, "do_sample_frames") else {}
    (rows,) = processor([np.array(image)], return_tensors="pt", **options).values()
    row: Tensor = rows.flatten(0, -4)[0]
    return row
