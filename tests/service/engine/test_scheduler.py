"""What becomes of a request where code of ours fails, and of a request's memory while its other rows run."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

import pytest

from tests.service.conftest import Serve
from tests.service.queue_harness import extract_request, post, random_rows, serving_nets

WAIT_S = 60.0


def test_failure_while_decoding(serve: Serve) -> None:
    """A bug of ours in a decode is that request's alone: its slot is free again, and the server lives."""
    with serving_nets(serve, "uphill", cpu_threads=1) as live:
        handle = live.engine.manager.handles["uphill"]
        decode = partial(live.engine.manager.scheduler.decode, handle.key)
        for _ in range(3):
            with pytest.raises(TypeError):
                live.run(decode(cast("Any", None), handle.model.model_inputs, "interactive", time.monotonic() + WAIT_S))
        assert live.client.get("/livez").status_code == 200
        assert post(live, extract_request(random_rows(1), "uphill", "linear")).status_code == 200
