"""Turns of models that load beside each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from layertap.models.devices.turns import HEAD_START_S, Turns

LONG_S = 60


@pytest.mark.parametrize("begin", [Turns.build, Turns.measure])
def test_head_start(begin: Callable[[Turns], AbstractContextManager[None]]) -> None:
    """A measurement waits for a build or a measurement that has begun, and for none that takes long."""
    now = [100.0]
    turns = Turns(lambda: now[0])

    def measure() -> bool:
        with turns.measure():
            return True

    with ThreadPoolExecutor(1) as pool:
        with begin(turns):
            now[0] += HEAD_START_S
            assert pool.submit(measure).result(LONG_S)
        with begin(turns):
            waiting = pool.submit(measure)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
        assert waiting.result(LONG_S)
