"""A model on all CUDA devices: the answers of one, wherever a batch runs, and each device takes some."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from layertap.models.devices.devices import resolve_device
from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import serving
from tests.service.gated_server import wait_until
from tests.service.support import arrays_of, picture, raw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SLACK_BYTES = 8 * 2**20  # of 45 MiB that the weights take
SPECS = (
    ModelSpec("one", "torchvision:resnet18", weights="random:0", device="cuda:0"),
    ModelSpec("all", "torchvision:resnet18", weights="random:0", devices=("all",)),
)


def test_same_vectors_on_all_devices() -> None:
    """Requests at the same time have the vectors and the fingerprint of the model on one device."""
    with serving(Configuration(SPECS, "one")) as live, ThreadPoolExecutor(16) as pool:
        device = live.client.get("/models/all").json()["device"]
        assert device == ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))

        def ask(model: str, seed: int) -> tuple[np.ndarray, str]:
            body = raw(picture(seed), "image/png", model=model, layers="avgpool", format="npy")
            reply = live.client.post("/extract", **body)
            (vector,) = arrays_of(reply).values()
            return vector, reply.headers["x-layertap-fingerprint"]

        seeds = range(64)
        ones = list(pool.map(lambda seed: ask("one", seed), seeds))
        for (one, its), (other, others) in zip(ones, pool.map(lambda seed: ask("all", seed), seeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
            assert its == others


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_auto_is_the_emptiest() -> None:
    """``auto`` is not the device of which somebody uses much."""
    taken = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    assert resolve_device("auto").index == free.index(max(free))
    del taken


def test_unloaded_memory_is_given_back() -> None:
    """What a model took of a device is free for other processes once it is unloaded."""
    lazy = replace(SPECS[0], name="lazy", load="lazy")
    with serving(Configuration((SPECS[0], lazy), "one")) as live:
        before, _ = torch.cuda.mem_get_info(0)
        assert live.client.post("/models/lazy/load").json()["state"] == "ready"
        assert torch.cuda.mem_get_info(0)[0] < before
        assert live.client.post("/models/lazy/unload").json()["state"] == "available"
        wait_until(lambda: torch.cuda.mem_get_info(0)[0] >= before - SLACK_BYTES)
