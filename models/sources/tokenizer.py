"""The tokenizer of a transformers directory, as a function that threads may share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.models.sources.build import wrap_build_errors

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class Tokenizer:
    """What a directory says of texts; ``leads`` tells whether a class token stands in front of every text."""

    encode: Callable[[str], list[int]]
    pad: int | None
    leads: bool
    max_tokens: int
    digest: str


def load_tokenizer(library: Any, folder: Path, shown: str, options: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer in a directory; None where there is none, or a slow one; LoadError where it can't be read."""
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

        def encode(text: str) -> list[int]:
            ids: list[int] = own.encode(text).ids
            return ids

        return Tokenizer(
            encode=encode,
            pad=whole.pad_token_id,
            leads=whole.cls_token_id is not None and encode("")[:1] == [whole.cls_token_id],
            max_tokens=int(whole.model_max_length),
            digest=hashlib.sha256(own.to_str().encode()).hexdigest(),
        )
