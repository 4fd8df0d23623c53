"""A server of ``digits`` and of a model that can be held up, which is idle after every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.server import Live, serving
from tests.service.gated_server import admitted_rows, wait_until
from tests.service.support import configured, net


@pytest.fixture(scope="module")
def clean() -> Iterator[None]:
    """Whoever runs the tests may have settings of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def live(clean: None) -> Iterator[Live]:
    with serving(configured(net("gated", "Gated"))) as live:
        yield live


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing waits and no hook is left, whatever clients did."""
    yield
    if "live" in request.fixturenames:
        live: Live = request.getfixturevalue("live")
        wait_until(lambda: admitted_rows(live) == 0)
        wait_until(lambda: live.client.get("/models/digits").json()["hooks"] == 0)
