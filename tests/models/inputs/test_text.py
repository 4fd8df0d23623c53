"""How many tokens a forward of texts has."""

from __future__ import annotations

import pytest
import torch

from layertap.models.inputs.model_inputs import TextSpec

TEXT = TextSpec("ids", "mask", max_tokens=512, pad=0, vocabulary=100)


@pytest.mark.parametrize(
    ("lengths", "least", "tokens"),
    [((12, 9), 0, 12), ((13, 9), 0, 16), ((9, 9), 14, 16), ((9, 10), 12, 12), ((3, 2), 0, 8), ((16, 1), 0, 16)],
)
def test_forward_is_as_long_as_its_longest_text(lengths: tuple[int, int], least: int, tokens: int) -> None:
    """In steps of four, as long as results need, and at least half of what it was."""
    pieces = [{"ids": torch.ones(1, 16, dtype=torch.int64), "mask": (torch.arange(16) < n)[None]} for n in lengths]
    for piece, cut in zip(pieces, TEXT.cut_padding(pieces, least), strict=True):
        assert {name: value.tolist() for name, value in cut.items()} == {
            name: value[:, :tokens].tolist() for name, value in piece.items()
        }


def test_tokens_behind_holes_are_kept() -> None:
    """What a mask leaves out in front of a token, or between two, is no end."""
    mask = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]])
    (cut,) = TEXT.cut_padding([{"ids": mask, "mask": mask}], 0)
    assert cut["mask"].tolist() == mask[:, :12].tolist()
