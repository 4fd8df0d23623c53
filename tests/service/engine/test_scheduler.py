"""What becomes of a request where code of ours fails, and of a request's memory while its other rows run."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

import pytest

from layertap.service.engine.prepare.job_maker import split_evenly
from layertap.service.inputs.items import EncodedItem
from tests.service.conftest import Serve
from tests.service.queue_harness import extract_request, post, random_rows, serving_nets

WAIT_S = 60.0


def test_failure_while_decoding(serve: Serve) -> None:
    """A bug of ours in a decode is that request's alone: its slot is free again, and the server lives."""
    with serving_nets(serve, "tower", cpu_threads=1) as live:
        handle = live.engine.manager.handles["tower"]
        decode = partial(live.engine.manager.scheduler.decode, handle.key)
        for _ in range(3):
            with pytest.raises(TypeError):
                live.run(decode(cast("Any", None), handle.model.model_inputs, "interactive", time.monotonic() + WAIT_S))
        assert live.client.get("/livez").status_code == 200
        assert post(live, extract_request(random_rows(1), "tower", "linear")).status_code == 200


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
    items = [EncodedItem(str(number).encode()) for number in range(count)]
    groups = split_evenly(items, slots, limit)
    assert [len(group) for group in groups] == SIZES[case]
    assert [item for group in groups for item in group] == items
