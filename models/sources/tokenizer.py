"""The tokenizer of a transformers directory, as a function that threads may share."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from layertap.models.sources.build import wrap_build_errors
from layertap.models.sources.sentence_head import SentenceFolder

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class Tokenizer:
    """What a directory says of texts; ``cut_to`` has those of more tokens cut from then on."""

    encode: Callable[[str], list[int]]
    pad: int | None
    max_tokens: int
    digest: str
    cut_to: Callable[[int], None]


def load_tokenizer(
    library: Any, folder: Path, shown: str, options: dict[str, Any], sentence: SentenceFolder | None = None
) -> Tokenizer | None:
    """The tokenizer in a directory; None where there is none, or a slow one; LoadError where it can't be read.

    Of a sentence-transformers folder texts are in small letters where that says so, and its own limit holds.
    """
    if not any((folder / name).is_file() for name in FILES):
        return None
    with wrap_build_errors(f"the tokenizer of {shown}"):
        whole = library.AutoTokenizer.from_pretrained(str(folder), **options)
        if not whole.is_fast:
            return None  # its wrapper keeps settings that threads can't share; ids can be sent
        # Its own copy: the library's wrapper sets truncation and padding at each call, which threads can't share.
        own = type(whole.backend_tokenizer).from_str(whole.backend_tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        if sentence is not None and sentence.lowercase:
            _lower(own)

        def encode(text: str) -> list[int]:
            ids: list[int] = own.encode(text).ids
            return ids

        return Tokenizer(
            encode=encode,
            pad=whole.pad_token_id,
            max_tokens=(sentence.max_tokens if sentence else None) or int(whole.model_max_length),
            digest=hashlib.sha256(own.to_str().encode()).hexdigest(),
            cut_to=partial(own.enable_truncation, direction=whole.truncation_side),
        )


def _lower(tokenizer: Any) -> None:
    """Put small letters before all else that a tokenizer does to a text, unless it does so already."""
    normalizers = importlib.import_module("tokenizers.normalizers")
    own = tokenizer.normalizer
    steps = [] if own is None else list(own) if isinstance(own, normalizers.Sequence) else [own]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
