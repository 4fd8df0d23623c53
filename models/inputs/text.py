"""How a model takes text: the names of its inputs, its limits, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layertap.models.catalog.catalog import LeftPadding
from layertap.models.spec import InputSpec, Truncate

if TYPE_CHECKING:
    from torch import Tensor

Encode = Callable[[str, int, Truncate], tuple[list[int], int]]
POSITIONS = "position_ids"  # by which a model is given the number of each token in its text
MIN_PADDED_LENGTH = 8  # tokens of the smallest bucket; each further one has twice as many
SURVEY_TOKENS = 32  # tokens of the row that a model is surveyed with


@dataclass(frozen=True)
class TextSpec:
    """What a model of texts takes.

    ``ids`` and ``mask`` are the names of its inputs; without a mask nothing may be padded. ``max_tokens`` counts the
    special ones; ``pad`` is the id that fills up, ``vocabulary`` the number of ids. ``encode`` takes a text, the most
    tokens and what is left out of a longer one, and gives the ids with the special ones around them, and how many were
    left out, for several threads at once; None where there is no tokenizer. ``is_fast``: it reads a million characters
    in about a second, and others at the same time. ``digest`` is of the tokenizer. ``pads``: whether a text may be
    padded and stand beside longer ones, or runs at its own length; ``left_padding``: how the model is given a text
    whose mask begins with zeros. ``truncate``: what is left out of a text of more than ``max_tokens`` where the request
    doesn't say. ``prompts`` are texts that a request puts in front of its own by name, ``default_prompt`` is the one of
    a request that names none. Where forwards go on from a layer its output stands in place of the ids: the vocabulary
    is 0 then, and ``axis`` the one of an item that has an entry for each token.
    """

    ids: str
    mask: str | None
    max_tokens: int
    pad: int
    vocabulary: int
    is_fast: bool = True
    encode: Encode | None = field(default=None, repr=False, compare=False)
    digest: str = ""
    axis: int = 0
    pads: bool = True
    left_padding: LeftPadding = "as sent"
    truncate: Truncate = "none"
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str = ""

    @property
    def is_read(self) -> bool:
        """Whether it takes texts and tokens, and not what a layer made of them."""
        return self.vocabulary > 0

    def get_padded_length(self, tokens: int) -> int:
        """The length that so many tokens are padded to: few lengths, so that requests share forwards."""
        if self.mask is None or not self.pads:
            return tokens
        size = MIN_PADDED_LENGTH
        while size < tokens:
            size *= 2
        return min(size, self.max_tokens)

    def numbers(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the model is given the numbers of the tokens in rows, for padding in front would shift them."""
        return self.left_padding == "numbered" and self.has_left_padding(rows)

    def has_left_padding(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether the mask leaves out the first position of a row that has any token."""
        if self.mask is None or self.mask not in rows:
            return False
        mask = rows[self.mask].bool()
        return bool((mask.any(1) & ~mask[:, 0]).any())

    def inputs(self) -> tuple[InputSpec, ...]:
        """The model's inputs, of a usual length; a row may be shorter, or as long as ``max_tokens``."""
        usual = (min(SURVEY_TOKENS, self.max_tokens),)
        ids = InputSpec(self.ids, usual, "int64", values=(0, self.vocabulary), longest=self.max_tokens)
        if self.mask is None:
            return (ids,)
        return ids, InputSpec(self.mask, usual, "int64", values=(1, 2), longest=self.max_tokens)


def number_tokens(mask: Tensor) -> Tensor:
    """The number of each position in its text (rows, tokens): 0 for the first that the mask keeps, and before it."""
    in_front = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    return (mask.new_ones(mask.shape).cumsum(1) - 1 - in_front).clamp(min=0)
