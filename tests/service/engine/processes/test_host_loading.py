"""What a model's host that dies does about graphs where it is started anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.service.config.configuration import Configuration
from tests.conftest import WARM, net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.engine.processes.test_decoding_executor import has_ended
from tests.service.engine.processes.test_trouble import list_pids, parent
from tests.service.gated_server import wait_until
from tests.service.support import Json, problem, tensor

SPEC = net_spec("Chain", warm=(WARM,))


def extract(live: Live) -> Any:
    body: Json = {"layers": ["conv"], "inputs": [tensor(torch.ones(3, 8, 8).numpy())]}
    return live.client.post("/extract", json=body)


def kill_host(live: Live) -> None:
    """As the system does where it runs out of memory; its workers end with it."""
    pids = [pid for pid in list_pids(live, SPEC.name) if not has_ended(pid)]
    os.kill(parent(pids[0]), signal.SIGKILL)
    wait_until(lambda: all(has_ended(pid) for pid in pids))


@pytest.mark.hard
@pytest.mark.usefixtures("compiler")
def test_graphs_are_opened(serve: Serve, tmp_path: Path) -> None:
    """A host that is started anew has the graphs that it had; where one is gone it is refused, and none is compiled."""
    with serve(Configuration((SPEC,), SPEC.name), cache_dir=tmp_path, cpu_threads=2, workers=2) as live:
        good = extract(live).json()
        assert good["receipts"]["conv"]["forward"] == "compiled"
        kill_host(live)
        again = extract(live).json()
        assert (again["features"], again["receipts"]) == (good["features"], good["receipts"])
        graphs = sorted((tmp_path / "plans").glob("*.pt2"))
        graphs[0].unlink()
        kill_host(live)
        found = problem(extract(live), 503, seconds=True)
        assert "it is another model than before" in found["detail"]
        assert found["errors"][0]["hint"] == f"POST /models/{SPEC.name}/load tries again"
        assert sorted((tmp_path / "plans").glob("*.pt2")) == graphs[1:]
