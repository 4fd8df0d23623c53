"""Rows: a tensor for each input of a model, with the rows on axis 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.spec import Shapes
from layertap.service.inputs.items import LocalItem

Rows = Mapping[str, Tensor]
Attempt = Rows | LayertapError  # the rows of an item, or its error
ItemAttempts = list[Sequence[Attempt]]  # of each item, which may be a batch
Fetched = LocalItem | LayertapError  # an input, or why it can't be fetched
Items = Sequence[tuple[int, Fetched]]  # with their indexes in the request


@dataclass(frozen=True)
class Origin:
    """Where a row is from: the ``rate`` of a sound as it was sent; a video's ``frames`` and their ``seconds``."""

    rate: int = 0
    frames: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


class CutRows(dict[str, Tensor]):
    """The row of a text, picture, sound or video, which may be cut.

    ``cut`` is the number of tokens or samples that were left out, 1 if pages were.
    """

    def __init__(self, rows: Rows, cut: int = 0, origin: Origin | None = None) -> None:
        super().__init__(rows)
        self.cut = cut
        self.origin = origin


def count_rows(attempts: ItemAttempts) -> int:
    """How many rows were made of items."""
    made = [rows for of_item in attempts for rows in of_item if not isinstance(rows, LayertapError)]
    return sum(len(next(iter(rows.values()))) for rows in made)


def get_row_shapes(rows: Rows) -> Shapes:
    """The shape of one row for each input of the model."""
    return tuple([tuple(value.shape[1:]) for value in rows.values()])


def join_rows(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """All rows of a request; their shapes agree."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: transfer.join_rows([part[name] for part in parts]) for name in parts[0]}
