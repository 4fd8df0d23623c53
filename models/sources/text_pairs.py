"""Pairs of texts: their tokens and token types, cut as transformers cuts them where they are too long together."""

from __future__ import annotations

from typing import Any

from layertap.models.spec import Truncate


def encode_pair(
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
