"""What a model's host does while it loads, beside others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from layertap.models.loading import take_turn
from layertap.service.settings import Settings
from layertap.service.workers import worker_process
from layertap.service.workers.process_executor import load_in_host
from tests.conftest import WARM, net_spec

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
        patch.setattr(worker_process, "take_turn", record)
        load_in_host(SPEC, settings, plans, print).host.close()
    return folder, turns


@pytest.mark.slow
def test_turns(compiled: tuple[Path, list[Turn]]) -> None:
    """It has a turn to load and another one to measure, and others load while it compiles."""
    _, turns = compiled
    assert turns == [("begins", 0), ("ends", 0), ("begins", 2), ("ends", 2)]
