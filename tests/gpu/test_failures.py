"""An accelerator that is lost, or has no room, while a model loads; and what loading leaves on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layertap.models.catalog import call_recorder
from layertap.models.catalog.call_recorder import Sketch
from layertap.models.devices.memory import measure_available_bytes
from layertap.models.spec import ModelSpec
from layertap.service import allocator
from layertap.service.config.configuration import Configuration
from layertap.service.process import EXIT_FAILED
from tests.gpu.accelerator import DEVICE, HOW, on_accelerator, simulated_only
from tests.gpu.nets import spec
from tests.server import serving
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT
from tests.service.support import arrays_of, configured, npy, picture, problem, raw, rows

pytestmark = on_accelerator
END_S = 120
MIB = 2**20
NET = ModelSpec("net", "torchvision:resnet18", weights="random:0", device=str(DEVICE), load="lazy", preprocess=HOW)


@simulated_only
def test_lost_when_a_model_is_loaded() -> None:
    """A device that is lost while a model loads on demand: no model of this process answers, nor does it live on."""
    import simdev

    with serving(Configuration((spec("Breaks"),), "breaks")) as live:
        try:
            problem(live.client.post("/models/breaks/load"), 503)
            wait_until(lambda: live.client.get("/livez").status_code == 503)
            assert not live.engine.manager.alive
        finally:
            simdev.mend_device(0)


def test_lost_at_the_start(tmp_path: Path) -> None:
    """A device that is lost while the server starts ends the process, with the status of a failure."""
    config = tmp_path / "models.json"
    config.write_text(json.dumps({"models": [asdict(spec("Breaks", load="startup"))]}))
    words = [sys.executable, "-m", "layertap", "serve", "--port", "0", "--config", str(config)]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, timeout=END_S, check=False).returncode == EXIT_FAILED


def test_an_error_of_a_device_that_is_in_order() -> None:
    """An error that the device gets over fails one model: the process lives, and others answer."""
    with serving(configured(spec("Complains"))) as live:
        problem(live.client.post("/models/complains/load"), 503)
        assert live.client.get("/livez").status_code == 200
        assert live.client.get("/models/complains").json()["state"] == "failed"
        assert live.client.post("/extract", **raw(picture(), "image/png", layers="pool")).status_code == 200


@contextmanager
def limited(total: int) -> Iterator[None]:
    """The simulated device with so much memory in all."""
    import simdev

    simdev.limit_memory(0, total)
    try:
        yield
    finally:
        simdev.limit_memory(0, 2**40)


@simulated_only
def test_a_failed_load_leaves_nothing() -> None:
    """A model for which there is no room takes no memory of the device afterwards."""
    with serving(Configuration((NET,), "net")) as live:
        allocator.release_memory()
        before = torch.accelerator.memory_allocated(DEVICE)
        with limited(torch.accelerator.memory_reserved(DEVICE) + 20 * MIB):
            free = measure_available_bytes(DEVICE)
            found = problem(live.client.post("/models/net/load"), 503)
            assert "OutOfMemoryError" in found["detail"]
            wait_until(lambda: torch.accelerator.memory_allocated(DEVICE) == before)
            wait_until(lambda: measure_available_bytes(DEVICE) == free)


def test_a_survey_leaves_nothing() -> None:
    """What compares tensors keeps nothing on the device."""
    call_recorder._make_weights.cache_clear()  # of other tests
    value = torch.ones(2**18, device=DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    assert Sketch.from_tensor(value).matches(Sketch.from_tensor(value.clone()))
    assert torch.accelerator.memory_allocated(DEVICE) == before


def test_cached_memory_is_released() -> None:
    """Memory that torch keeps for later is free for others once it is released."""
    value = torch.ones(64 * MIB, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    free = measure_available_bytes(DEVICE)
    del value
    assert measure_available_bytes(DEVICE) < free + 64 * MIB
    allocator.release_memory()
    assert measure_available_bytes(DEVICE) >= free + 64 * MIB


def test_what_loading_puts_back() -> None:
    """What the last forward of loading changed is put back before the first request, whichever replica it meets."""
    given = rows(1)
    with (
        serving(Configuration((spec("Counts", device="auto", devices=("all",)),), "counts"), gpu_streams=2) as live,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(_: int) -> Any:
            request = raw(npy(given), "application/x-npy", layers="head,.", format="npz")
            return arrays_of(live.client.post("/extract", **request))

        for _ in range(4):
            assert live.client.post("/models/counts/load").json()["state"] == "ready"
            for found in pool.map(ask, range(8)):
                np.testing.assert_allclose(found["."], 2 * found["head"], rtol=1e-5)
            assert live.client.post("/models/counts/unload").json()["state"] == "available"
