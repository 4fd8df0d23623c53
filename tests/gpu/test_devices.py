"""A model on all accelerators: the answers of one, wherever a batch runs, and each device takes some."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from layertap.models.devices.devices import resolve_device
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import IS_SIMULATED, KIND, on_accelerator
from tests.gpu.nets import net_spec
from tests.server import serving
from tests.service.gated_server import wait_until
from tests.service.support import arrays_of, picture, raw

pytestmark = on_accelerator
SLACK_BYTES = 0 if IS_SIMULATED else 8 * 2**20  # of 45 MiB that the weights take
SPECS = (net_spec("cpu", device="cpu"), net_spec("all", device="auto", devices=("all",)))


def test_same_vectors_on_all_devices() -> None:
    """Requests at the same time, soon after loading, have the vectors and the fingerprint of the model on the CPU."""
    with serving(Configuration(SPECS, "cpu"), replicas=1) as live, ThreadPoolExecutor(16) as pool:
        device = live.client.get("/models/all").json()["device"]
        assert device == ", ".join(f"{KIND}:{index}" for index in range(torch.accelerator.device_count()))

        def ask(model: str, seed: int) -> tuple[np.ndarray, str]:
            body = raw(picture(seed), "image/png", model=model, layers="avgpool", format="npy")
            reply = live.client.post("/extract", **body)
            (vector,) = arrays_of(reply).values()
            return vector, reply.headers["x-layertap-fingerprint"]

        seeds = range(8)
        every = list(pool.map(lambda seed: ask("all", seed), seeds))  # first: what loading began may be under way
        for (one, its), (other, others) in zip(every, pool.map(lambda seed: ask("cpu", seed), seeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
            assert its == others


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_auto_is_the_emptiest() -> None:
    """``auto`` is not the device of which somebody uses much."""
    taken = torch.empty(2**30, dtype=torch.uint8, device=f"{KIND}:0")
    free = [torch.accelerator.get_memory_info(index)[0] for index in range(torch.accelerator.device_count())]
    assert resolve_device("auto").index == free.index(max(free))
    del taken


def test_unloaded_memory_is_given_back() -> None:
    """What a model took of a device is free for other processes once it is unloaded."""
    lazy = net_spec("lazy", device=f"{KIND}:0", load="lazy")
    with serving(Configuration((lazy,), "lazy")) as live:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()  # of other tests
        before, _ = torch.accelerator.get_memory_info(0)
        assert live.client.post("/models/lazy/load").json()["state"] == "ready"
        assert torch.accelerator.get_memory_info(0)[0] < before
        assert live.client.post("/models/lazy/unload").json()["state"] == "available"
        wait_until(lambda: torch.accelerator.get_memory_info(0)[0] >= before - SLACK_BYTES)
