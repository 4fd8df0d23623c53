"""Which devices there are, what they report, and what of them is global: whatever kind torch has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from layertap.models.devices import devices, memory, transfer
from layertap.models.devices.devices import UNKNOWN_BYTES, find_lack, is_accelerator, list_devices, resolve_device
from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import DEVICE, IS_SIMULATED, KIND, on_accelerator, simulated_only
from tests.gpu.nets import spec
from tests.server import serving
from tests.service.support import npy, raw, rows

pytestmark = on_accelerator
COUNT = torch.accelerator.device_count()
ALL = [f"{KIND}:{index}" for index in range(COUNT)]
MIB = 2**20


def test_names() -> None:
    """A kind with or without a number, ``auto`` and ``all`` are accelerators of this machine; others are refused."""
    assert resolve_device(KIND) == resolve_device(f"{KIND}:0") == DEVICE
    assert str(resolve_device("auto")) in ALL
    assert resolve_device("cpu") == torch.device("cpu")
    assert list_devices(["all"]) == tuple(ALL)
    assert list_devices([f"{KIND}:0"]) == (f"{KIND}:0",)
    assert [is_accelerator(device) for device in (DEVICE, torch.device("cpu"))] == [True, False]
    for name in (f"{KIND}:{COUNT}", "xpu", "mps", *(["npu"] if IS_SIMULATED else [])):  # a plugin may have any name
        with pytest.raises(LoadError) as told:
            resolve_device(name)
        assert told.value.detail == f"there is no device '{name}' on this machine"
        assert told.value.hint == f"use one of {', '.join(['auto', 'cpu', *ALL])}"
    with pytest.raises(LoadError):
        list_devices([f"{KIND}:0", f"{KIND}:{COUNT}"])


@simulated_only
def test_what_only_cuda_does() -> None:
    """Each of the four says what it needs."""
    for setting, needs in devices.CUDA_ONLY.items():
        assert find_lack(DEVICE, setting) == f"{setting} needs CUDA, and {needs}"
        assert find_lack(torch.device("cpu"), setting) == "there is no GPU"
        assert find_lack(torch.device("cuda", 0), setting) == ""


@pytest.mark.skipif(COUNT < 2, reason="needs two accelerators")
def test_current_device() -> None:
    """A block has another current device, and the thread its own again afterwards."""
    before = torch.accelerator.current_device_index()
    with devices.use_device(torch.device(KIND, 1)):
        assert torch.accelerator.current_device_index() == 1
    with devices.use_device(torch.device("cpu")):
        assert torch.accelerator.current_device_index() == before


def test_generators_are_put_back() -> None:
    """What a construction draws on a device leaves its generator as it was; equal seeds draw equal numbers."""
    module = torch.get_device_module(DEVICE)
    torch.ones(1, device=DEVICE)
    before = module.get_rng_state(0)
    drawn = []
    for _ in range(2):
        with construct_alone(5):
            drawn.append(torch.rand(8, device=DEVICE).cpu())
    assert drawn[0].equal(drawn[1])
    assert module.get_rng_state(0).equal(before)


@contextmanager
def hidden_memory() -> Iterator[None]:
    """The simulated device without figures of its memory, as some kinds are."""
    import simdev

    simdev.hide_memory(True)
    try:
        yield
    finally:
        simdev.hide_memory(False)


@simulated_only
def test_without_figures_of_memory() -> None:
    """On a device that does not report its memory the settings alone limit a forward."""
    deep = spec("Deep", load="startup")
    with hidden_memory():
        assert memory.measure_available_bytes(DEVICE) == UNKNOWN_BYTES
        assert str(resolve_device("auto")) in ALL
        with serving(Configuration((deep,), "deep"), max_batch_rows=3) as live:
            request = raw(npy(rows(7)), "application/x-npy", layers=".", format="npy")
            assert live.client.post("/extract", **request).status_code == 200
            handle = live.engine.manager.handles["deep"]
            key = handle.batch_keys.get(handle.model.catalog, handle.model.shapes)
    assert key.max_rows == 3
    assert memory.measure_available_bytes(DEVICE) < UNKNOWN_BYTES


def test_peak_is_a_forwards_own() -> None:
    """The memory of a forward is the same while other threads use much, and near to what the device reports alone."""
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(DEVICE)
    batch = {"x": torch.ones(256, 512, device=DEVICE)}

    def forward(given: memory.Inputs) -> Tensor:
        out: Tensor = net(given["x"])
        return out

    def measure() -> int:
        with torch.no_grad():
            return memory.measure_peak_bytes(forward, batch, net)

    measure()  # what libraries keep for good is there by now
    transfer.synchronize(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    quiet = measure()
    reported = torch.accelerator.max_memory_allocated(DEVICE) - before
    assert 0.9 * reported <= quiet <= 1.1 * reported
    ended = threading.Event()

    def use_much() -> None:
        transfer.use_own_stream(DEVICE)
        while not ended.is_set():
            torch.empty(16 * MIB, dtype=torch.uint8, device=DEVICE)
            transfer.synchronize_stream(DEVICE)

    other = threading.Thread(target=use_much)
    other.start()
    try:
        assert {measure() for _ in range(50)} == {quiet}
    finally:
        ended.set()
        other.join()
