"""What an unloaded model had is free at once: on a GPU the next one needs it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, Versions, entry
from tests.service.gated_server import post_rows, wait_until

Let = Callable[[httpx.Client], httpx.Response]
WAYS: dict[str, Let] = {
    "unloaded": lambda client: client.post("/models/gated/unload"),
    "exchanged": lambda client: client.put("/models/gated", json=entry("b")),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What refers to itself stays, as it does for hours in a server that is idle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS)
def test_freed(serve: Serve, versions: Versions, way: str) -> None:
    """Nothing holds the module of a model that answered and is gone."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration) as live:
        assert post_rows(live).status_code == 200
        module = weakref.ref(live.engine.manager.handles["gated"].model.module)
        assert module() is not None
        assert WAYS[way](live.client).status_code == 200
        wait_until(lambda: module() is None)
