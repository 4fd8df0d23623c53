"""The tokenizer of a transformers directory, as a function that threads may share."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from layertap.models.inputs.text import Encode
from layertap.models.sources.build import wrap_build_errors
from layertap.models.sources.sentence_head import SentenceFolder
from layertap.models.spec import Truncate

SIDES: dict[str, Truncate] = {"left": "start", "right": "end"}
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class Tokenizer:
    """What a directory says of texts.

    ``encode`` as that of TextSpec; ``side`` is the one at which the library cuts. ``fill_to`` has texts of fewer tokens
    filled up; None where the model is told which tokens do.
    """

    encode: Encode
    pad: int | None
    max_tokens: int
    digest: str
    side: Truncate
    fill_to: Callable[..., None] | None = None


def load_tokenizer(
    library: Any, folder: Path, shown: str, options: dict[str, Any], sentence: SentenceFolder | None = None
) -> Tokenizer | None:
    """The tokenizer in a directory; None where there is none, or it gives types of tokens; LoadError for a broken one.

    Of a sentence-transformers folder texts are in small letters where that says so, and its own limit holds.
    """
    if not any((folder / name).is_file() for name in FILES):
        return None
    with wrap_build_errors(f"the tokenizer of {shown}"):
        whole = library.AutoTokenizer.from_pretrained(str(folder), **options)
        if any(whole("a").get("token_type_ids", ())) or (sentence is not None and not whole.is_fast):
            return None  # no model is given types of tokens here; ids can be sent
        limit = (sentence.max_tokens if sentence else None) or int(whole.model_max_length)
        if not whole.is_fast:
            settings = {name: value for name, value in whole.init_kwargs.items() if str(folder) not in str(value)}
            described = type(whole).__name__, sorted(settings.items()), whole.get_vocab()
            digest = hashlib.sha256(repr(described).encode()).hexdigest()
            return Tokenizer(
                partial(_encode_slowly, whole, Lock()), whole.pad_token_id, limit, digest, SIDES[whole.truncation_side]
            )
        # Its own copy: the library's wrapper sets truncation and padding at each call, which threads can't share.
        own = type(whole.backend_tokenizer).from_str(whole.backend_tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        if sentence is not None and sentence.lowercase:
            _lower(own)
        return Tokenizer(
            encode=partial(_encode, own),
            pad=whole.pad_token_id,
            max_tokens=limit,
            digest=hashlib.sha256(own.to_str().encode()).hexdigest(),
            side=SIDES[whole.truncation_side],
            fill_to=None
            if "attention_mask" in whole.model_input_names
            else partial(own.enable_padding, direction=whole.padding_side, pad_id=whole.pad_token_id or 0),
        )


def _encode(own: Any, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    encoding = own.encode(text)
    excess = len(encoding.ids) - limit
    if excess <= 0 or truncate == "none":
        return encoding.ids, 0
    encoding = own.encode(text, add_special_tokens=False)
    kept = limit - own.num_special_tokens_to_add(False)
    encoding.truncate(kept, direction="left" if truncate == "start" else "right")
    return own.post_process(encoding).ids, excess


def _encode_slowly(whole: Any, lock: Lock, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    with lock:  # one in Python may keep something from call to call
        ids: list[int] = whole(text)["input_ids"]
        excess = len(ids) - limit
        if excess <= 0 or truncate == "none":
            return ids, 0
        whole.truncation_side = "left" if truncate == "start" else "right"
        return whole(text, truncation=True, max_length=limit)["input_ids"], excess


def _lower(tokenizer: Any) -> None:
    """Put small letters before all else that a tokenizer does to a text, unless it does so already."""
    normalizers = importlib.import_module("tokenizers.normalizers")
    own = tokenizer.normalizer
    steps = [] if own is None else list(own) if isinstance(own, normalizers.Sequence) else [own]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
