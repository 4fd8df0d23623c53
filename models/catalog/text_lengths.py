"""How many tokens the texts of a request have, and what follows for the shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.inputs.model_inputs import TextSpec


@dataclass(frozen=True)
class TextLengths:
    """How many tokens the texts of a request have: ``fewest`` to ``most`` that the mask keeps.

    ``longest`` counts those of the longest text up to the last that is kept, with what the mask leaves out before it;
    ``union`` the positions that any text keeps, which are those of a tensor that is the same for all rows.
    ``known`` is False as long as a text may still have any number between ``fewest`` and ``most``.
    """

    fewest: int
    most: int
    longest: int
    union: int
    known: bool = True

    @property
    def common(self) -> int:
        """Tokens that every text has, or may have: what a request may number."""
        return self.fewest if self.known else self.most

    @property
    def kept(self) -> int:
        """Positions that a result has, or has at least."""
        return self.longest if self.known else self.fewest


def measure_lengths(rows: Mapping[str, Tensor], text: TextSpec) -> TextLengths:
    """The lengths of rows as a model takes them, by their mask."""
    if text.mask is None:
        tokens = rows[text.ids].shape[1 + text.axis]
        return TextLengths(tokens, tokens, tokens, tokens)
    mask = rows[text.mask].bool()
    counts, columns = mask.sum(1), mask.any(0).nonzero()
    return TextLengths(int(counts.min()), int(counts.max()), int(columns.max()) + 1, len(columns))


def with_common_length(info: TensorInfo, lengths: TextLengths | None) -> TensorInfo:
    """A tensor with the tokens that every text of a request has."""
    return info if lengths is None else info.with_length(lengths.common)
