"""The same truths on an accelerator, over HTTP: the simulated one, or a GPU where there is one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load as read_safetensors
from safetensors.torch import save_file

from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import IS_SIMULATED, KIND, SIDE, on_accelerator, on_cuda
from tests.gpu.nets import make_net, net_spec
from tests.oracle import record, seeded
from tests.server import serving

pytestmark = on_accelerator
LEFT_BYTES = 2**19 if IS_SIMULATED else 200 * 2**20  # for a batch of 16 rows, which takes more
LAYERS = ("layer1", "avgpool", "layer2.0.bn1,layer3", "fc", "*.relu#*", "conv1:input")
# Kernels of the simulated device are the CPU's: what differs with architectures and dtypes is shown there.
NETS = tuple(product(("resnet18", "swin_t", "vit_b_32"), ("float32", "bfloat16", "float16")))
SIMULATED_NETS = (("resnet18", "float32"), ("resnet18", "bfloat16"))
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@pytest.mark.parametrize(("arch", "dtype"), SIMULATED_NETS if IS_SIMULATED else NETS)
def test_every_layer_equals_an_offline_hook_on_the_device(arch: str, dtype: str, tmp_path: Path) -> None:
    """On the device, in each dtype, every module's output is what a hook with an immediate copy gives there."""
    net = seeded(make_net(arch), 1).eval()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    rows = torch.randn((2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(2))
    tf32(False)
    seen = record(net.to(KIND, getattr(torch, dtype)), rows.to(KIND, getattr(torch, dtype)))
    spec = net_spec(arch=arch, weights=str(tmp_path / "net.safetensors"), dtype=dtype)
    with serving(Configuration((spec,), "net"), max_reply_bytes=2**31, max_results=10_000, deadline_s=300) as live:
        got = _extract(live.client, rows, "*#*,.")
        assert live.client.get("/models/net").json()["device"] == f"{KIND}:0"
    for (name, call, path, site), value in seen.items():
        if site != "output" or path:
            continue
        key = f"{name}#{call}" if (name, 1, (), "output") in seen else name
        expected = value.float().cpu().numpy()
        scale = max(float(np.abs(expected).max()), 1e-6)
        assert np.abs(got[key] - expected).max() <= TOLERANCE[dtype] * scale, key


def test_the_same_request_gives_the_same_bits(tmp_path: Path) -> None:
    """Twice the same batch on the device, twice the same bits; the fingerprint is that of the CPU."""
    rows = torch.randn((4, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(4))
    prints = set()
    for device in (KIND, "cpu"):
        placed = net_spec(weights="random:3", device=device)
        with serving(Configuration((placed,), "net")) as live:
            replies = [_post(live.client, rows, "avgpool") for _ in range(2)]
        assert replies[0].content == replies[1].content
        prints.add(replies[0].headers["X-Layertap-Fingerprint"])
    assert len(prints) == 1


@pytest.mark.parametrize("streams", [1, 2])
def test_many_at_once_each_get_their_own(streams: int) -> None:
    """Requests for different layers that share forwards on the device, or overlap there, get what each gets alone."""
    spec = net_spec(weights="random:5")
    generator = torch.Generator().manual_seed(6)
    wanted = [
        (torch.randn((1 + number % 3, 3, SIDE, SIDE), generator=generator), LAYERS[number % len(LAYERS)])
        for number in range(18 if IS_SIMULATED else 48)
    ]
    with serving(Configuration((spec,), "net"), gpu_streams=streams) as live:
        model = live.engine.manager.registry.get_entry("net").model
        assert model is not None
        assert len(model.replicas) == streams
        assert not model.catalog.crosses_rows  # else all run alone, and this shows nothing
        alone = [_extract(live.client, rows, layers) for rows, layers in wanted]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda each: _extract(live.client, *each), wanted))
        assert live.client.get("/models/net").json()["hooks"] == 0
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for key, expected in one.items():
            scale = max(float(np.abs(expected).max()), 1e-6)
            assert np.abs(other[key] - expected).max() <= TOLERANCE["float32"] * scale, key


def test_out_of_memory_is_split(tmp_path: Path) -> None:
    """A batch that the device has no memory for runs in pieces, and its request is answered."""
    spec = net_spec(weights="random:5")
    rows = torch.randn((16, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(7))
    with serving(Configuration((spec,), "net"), batch_memory_bytes=2**40) as live:
        expected = _extract(live.client, rows, "avgpool")["avgpool"]
        torch.accelerator.empty_cache()
        free, _ = torch.accelerator.get_memory_info()
        hog = torch.empty(max(free - LEFT_BYTES, 1), dtype=torch.uint8, device=KIND)
        found = _extract(live.client, rows, "avgpool")["avgpool"]
        del hog
        told = live.client.get("/metrics").text.splitlines()
        assert any("split_total{" in line and "memory" in line and not line.endswith(" 0.0") for line in told)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [pytest.param({"tf32": True}, marks=on_cuda), {"dtype": "bfloat16", "memory_format": "channels_last"}],
    ids=str,
)
def test_chosen_precision(fields: dict[str, object], tmp_path: Path) -> None:
    """With TF32, or another memory format, features are those of an offline hook that computes in the same way."""
    net = seeded(make_net(), 9).eval()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    rows = torch.randn((2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(10))
    dtype, layout = getattr(torch, str(fields.get("dtype", "float32"))), torch.contiguous_format
    if "memory_format" in fields:
        layout = torch.channels_last
    tf32("tf32" in fields)
    seen = record(net.to(KIND, dtype, memory_format=layout), rows.to(KIND, dtype, memory_format=layout))
    plain = net_spec(weights=str(tmp_path / "net.safetensors"))
    chosen = replace(plain, **fields)  # type: ignore[arg-type]
    prints, replies = [], []
    for spec in (plain, chosen):
        with serving(Configuration((spec,), "net")) as live:
            reply = _post(live.client, rows, "layer4,avgpool")
            prints.append(reply.headers["X-Layertap-Fingerprint"])
            replies.append(read_safetensors(reply.content))
    assert prints[0] != prints[1]
    full = replies[0]["layer4"]
    assert np.abs(replies[1]["layer4"] - full).max() > 1e-5 * np.abs(full).max()
    for name, found in replies[1].items():
        expected = seen[name, 0, (), "output"].float().cpu().numpy()
        tolerance = 5e-3 if "tf32" in fields else TOLERANCE["bfloat16"]
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max(), name


def test_a_failed_assertion_on_the_device_ends_all_answers() -> None:
    """After an index beyond a table, which poisons the process, nothing is answered; in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.poisoned"]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=False)
    assert json.loads(told.stdout.splitlines()[-1]) == {
        "before": [200, 200],
        "poisoned": 503,
        "after": [503, 503, 503],
        "state": "failed",
    }


def tf32(allowed: bool) -> None:
    """How products of float32 are computed offline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch name a successor of these
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed


def _post(client, rows: torch.Tensor, layers: str):
    body = io.BytesIO()
    np.save(body, rows.numpy())
    reply = client.post(
        "/extract",
        params={"layers": layers, "format": "safetensors"},
        content=body.getvalue(),
        headers={"Content-Type": "application/x-npy"},
    )
    assert reply.status_code == 200, reply.text
    return reply


def _extract(client, rows: torch.Tensor, layers: str) -> dict[str, np.ndarray]:
    return read_safetensors(_post(client, rows, layers).content)
