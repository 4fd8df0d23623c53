"""How a model takes text: the names of its inputs, its limits, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from layertap.models.spec import InputSpec

MIN_PADDED_LENGTH = 8  # tokens of the smallest bucket; each further one has twice as many
SURVEY_TOKENS = 32  # tokens of the row that a model is surveyed with


@dataclass(frozen=True)
class TextSpec:
    """What a model of texts takes.

    ``ids`` and ``mask`` are the names of its inputs; without a mask nothing may be padded. ``max_tokens`` counts the
    special ones; ``pad`` is the id that fills up, ``vocabulary`` the number of ids. ``encode`` gives the ids of a text
    with the special ones around them, for several threads at once; None where there is no tokenizer. ``digest`` is of
    the tokenizer. Where forwards go on from a layer its output stands in place of the ids: the vocabulary is 0 then,
    and ``axis`` the one of an item that has an entry for each token.
    """

    ids: str
    mask: str | None
    max_tokens: int
    pad: int
    vocabulary: int
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False, compare=False)
    digest: str = ""
    axis: int = 0

    @property
    def is_read(self) -> bool:
        """Whether it takes texts and tokens, and not what a layer made of them."""
        return self.vocabulary > 0

    def get_padded_length(self, tokens: int) -> int:
        """The length that so many tokens are padded to: few lengths, so that requests share forwards."""
        if self.mask is None:
            return tokens
        size = MIN_PADDED_LENGTH
        while size < tokens:
            size *= 2
        return min(size, self.max_tokens)

    def inputs(self) -> tuple[InputSpec, ...]:
        """The model's inputs, of a usual length; a row may be shorter, or as long as ``max_tokens``."""
        usual = (min(SURVEY_TOKENS, self.max_tokens),)
        ids = InputSpec(self.ids, usual, "int64", values=(0, self.vocabulary), longest=self.max_tokens)
        if self.mask is None:
            return (ids,)
        return ids, InputSpec(self.mask, usual, "int64", values=(1, 2), longest=self.max_tokens)
