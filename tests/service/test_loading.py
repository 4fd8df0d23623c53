"""Models that load at the same time, while another runs: none changes the numbers of any other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file
from torchvision.models import resnet18

from layertap.models.devices import turns
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.models.sources import plain_weights
from tests.oracle import seeded
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.support import arrays_of, net, npy, raw, rows
from tests.transformers_nets import TEXT, saved

LLAMAS = ("llama-1", "llama-2", "llama-3")
THIRD = np.full((1, 4), 1 / 3, np.float32)


def write_mixture(folder: Path) -> tuple[Configuration, dict[str, str]]:
    """A configuration, and the digests of its models' weights, found without loading them here."""
    for number, name in enumerate(LLAMAS):
        config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
        seeded(transformers.LlamaModel(config), number).bfloat16().save_pretrained(folder / name)
    saved("vit", folder / "vit")
    saved("gpt2", folder / "gpt2")
    file = folder / "resnet18.safetensors"
    save_file(seeded(resnet18(weights=None), 4).state_dict(), file)
    directories = (*LLAMAS, "vit", "gpt2")
    found = plain_weights.plain(*(folder / name for name in directories))
    digests = {name: found[name].digest for name in directories}
    twice = dict.fromkeys(("resnet-1", "resnet-2"), plain_weights.digest(load_file(file)))
    fields: dict[str, Any] = {"device": "cpu", "load": "startup"}
    resnet = {"weights": str(file), "inputs": (InputSpec("x", (3, 32, 32)),), "preprocess": "none", **fields}
    specs = (
        *(ModelSpec(name, f"transformers:{folder / name}", **fields) for name in directories),
        *(ModelSpec(name, "torchvision:resnet18", **resnet) for name in twice),
        net("thirds", "Thirds", load="startup"),
    )
    return Configuration(specs, "thirds"), digests | twice


def ask(url: str, stop: threading.Event) -> int:
    """How many answers the running model gave until it was told to stop, all of them right."""
    sent = raw(npy(rows()), "application/x-npy", model="thirds", layers=".", format="npz")
    with httpx.Client(base_url=url, timeout=120) as client:
        for answers in count():
            if stop.is_set():
                return answers
            np.testing.assert_array_equal(arrays_of(client.post("/extract", **sent))["."], THIRD)
    raise AssertionError


@pytest.mark.slow
def test_a_mixture_of_models(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is ready with the weights of its file, every answer that is given meanwhile is exactly right."""
    monkeypatch.setattr(turns, "TURN_TIMEOUT_S", 0.0)  # loads do not wait for each other, not even to be measured
    (configuration, digests), stop = write_mixture(tmp_path), threading.Event()
    with serve(configuration, wait=False, cpu_threads=2) as live, ThreadPoolExecutor(2) as pool:
        wait_until(lambda: live.client.get("/models/thirds").json()["state"] == "ready")
        askers = [pool.submit(ask, live.url, stop) for _ in range(2)]
        try:
            wait_until(lambda: not any(each["state"] == "loading" for each in listed(live)))
            found = {each["name"]: (each["state"], each.get("weights_digest")) for each in listed(live)}
        finally:
            stop.set()
        assert all(asker.result() for asker in askers)
    wanted = {name: ("ready", digest) for name, digest in digests.items()}
    assert {name: found[name] for name in wanted} == wanted


def listed(live: Live) -> list[dict[str, Any]]:
    """What ``GET /models`` says."""
    return live.client.get("/models").json()["models"]
