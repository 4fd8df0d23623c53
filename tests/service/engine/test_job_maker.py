"""A request's items in groups: few, even ones that keep every slot busy to the end."""

from __future__ import annotations

import pytest

from layertap.service.engine.rows.job_maker import split_evenly
from layertap.service.inputs.items import ImageItem

SIZES: dict[tuple[int, int, int], list[int]] = {  # of the groups, by items, slots, and the most that one may have
    (0, 2, 8): [],
    (1, 2, 8): [1],
    (2, 2, 8): [1, 1],
    (5, 2, 8): [2, 3],
    (18, 2, 8): [4, 5, 4, 5],
    (32, 4, 8): [8, 8, 8, 8],
    (33, 4, 8): [4, 4, 4, 4, 4, 4, 4, 5],
    (3, 16, 8): [1, 1, 1],
    (3, 2, 1): [1, 1, 1],
}


@pytest.mark.parametrize("case", SIZES)
def test_split_evenly(case: tuple[int, int, int]) -> None:
    """All items are in one group each, in order."""
    count, slots, limit = case
    items = [ImageItem(str(number).encode()) for number in range(count)]
    groups = split_evenly(items, slots, limit)
    assert [len(group) for group in groups] == SIZES[case]
    assert [item for group in groups for item in group] == items
