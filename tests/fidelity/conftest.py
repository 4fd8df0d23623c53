"""Memory goes back to the system after each model, and a run's figures into its report."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator

import pytest

from tests.fidelity.compare import Tally

Noted = Callable[[Tally], None]


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> None:
    """Whoever runs the tests may have settings of their own."""
    for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _trim() -> Iterator[None]:
    """The allocator would keep every model's share: the next one needs it in other pieces."""
    yield
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Noted:
    """Writes a tally into the report that ``--junitxml`` makes; ``tests.fidelity.table`` reads it."""

    def note(tally: Tally) -> None:
        request.node.user_properties += [
            ("layers", len(tally.layers)),
            ("tensors", tally.tensors),
            ("identical", tally.identical),
            ("deviation", f"{tally.deviation:.1e}"),
        ]

    return note
