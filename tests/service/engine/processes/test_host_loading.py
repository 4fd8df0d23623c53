"""What a model's host does while it loads, beside others and where it is started anew."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.models.spec import ModelSpec
from layertap.models.turns import take_turn
from layertap.service.config.configuration import Configuration
from layertap.service.engine.execute.processes import model_host
from layertap.service.engine.execute.processes.executors import load_in_host
from layertap.service.settings import Settings
from tests.conftest import WARM, net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.engine.processes.test_decoding_executor import has_ended
from tests.service.engine.processes.test_trouble import list_pids, parent
from tests.service.gated_server import wait_until
from tests.service.support import Json, problem, tensor

THREADS = 2
SPEC = net_spec("Chain", warm=(WARM,))
Turn = tuple[str, int]


@pytest.fixture(scope="module")
def compiled(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Turn]]:
    """The cache folder of a host that found no graphs, and how many there were when its turns began and ended."""
    del compiler
    folder = tmp_path_factory.mktemp("cache")
    plans, turns = folder / "plans", list[Turn]()

    @contextmanager
    def record() -> Iterator[None]:
        with take_turn():
            turns.append(("begins", len([*plans.glob("*.pt2")])))
            yield
            turns.append(("ends", len([*plans.glob("*.pt2")])))

    settings = Settings(workers=1, cpu_threads=THREADS, cache_dir=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_host, "take_turn", record)
        load_in_host(SPEC, settings, plans, print).host.close()
    return folder, turns


@pytest.mark.slow
def test_turns(compiled: tuple[Path, list[Turn]]) -> None:
    """It has a turn for its survey and another one to measure its graphs, and others are measured while it compiles."""
    _, turns = compiled
    assert turns == [("begins", 0), ("ends", 0), ("begins", 2), ("ends", 2)]


def configure(spec: ModelSpec) -> Configuration:
    return Configuration((spec,), spec.name)


def extract(live: Live) -> Any:
    body: Json = {"layers": ["conv"], "inputs": [tensor(torch.ones(3, 8, 8).numpy())]}
    return live.client.post("/extract", json=body)


def kill_host(live: Live) -> None:
    """As the system does where it runs out of memory; its workers end with it."""
    pids = [pid for pid in list_pids(live, SPEC.name) if not has_ended(pid)]
    os.kill(parent(pids[0]), signal.SIGKILL)
    wait_until(lambda: all(has_ended(pid) for pid in pids))


def check_refused(reply: Any) -> None:
    found = problem(reply, 503, seconds=True)
    assert "it is another model than before" in found["detail"]
    assert found["errors"][0]["hint"] == f"POST /models/{SPEC.name}/load tries again"


@pytest.mark.slow
def test_graphs_are_opened(serve: Serve, tmp_path: Path, compiled: tuple[Path, list[Turn]]) -> None:
    """A host that is started anew has the graphs that it had; where one is gone it is refused, and none is compiled."""
    cache, _ = compiled
    shutil.copytree(cache, tmp_path / "cache")
    with serve(configure(SPEC), cache_dir=tmp_path / "cache", cpu_threads=THREADS, workers=2) as live:
        good = extract(live).json()
        assert good["receipts"]["conv"]["forward"] == "compiled"
        kill_host(live)
        again = extract(live).json()
        assert (again["features"], again["receipts"]) == (good["features"], good["receipts"])
        graphs = sorted((tmp_path / "cache" / "plans").glob("*.pt2"))
        graphs[0].unlink()
        kill_host(live)
        check_refused(extract(live))
        assert sorted((tmp_path / "cache" / "plans").glob("*.pt2")) == graphs[1:]
