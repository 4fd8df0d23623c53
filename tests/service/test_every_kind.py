"""Every kind of hook at the same time, on a transformer with fused attention: each answer is what it is alone.

What is wanted is computed part by part on copies of the model that the server never sees.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from tests.oracle import seeded
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, tensor

BLOCK, CLASS, ROUNDS = "blocks.1", 3, 2
Kind = Callable[[Any, Tensor], tuple[Json, dict[str, Array]]]


def fused() -> VisionTransformer:
    """Attention in one kernel, as timm has it by default."""
    module = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=7)
    for block in module.blocks:
        block.attn.fused_attn = True
    return seeded(module, 9)


@pytest.fixture(
    scope="module", params=[pytest.param(0, id="threads"), pytest.param(2, id="processes", marks=pytest.mark.slow)]
)
def transformer(serve: Serve, request: pytest.FixtureRequest) -> Iterator[Live]:
    spec = ModelSpec("vit", f"python:{__name__}:fused", inputs=(InputSpec("x", (3, 32, 32)),), device="cpu")
    with serve(configured(spec), workers=request.param) as live:
        yield live


def upto(net: Any, x: Tensor, last: int) -> Tensor:
    """What comes out of a block; of number -1, what goes into the first one."""
    x = net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x))))
    for block in net.blocks[: last + 1]:
        x = block(x)
    return x


def after(net: Any, x: Tensor, first: int) -> Tensor:
    """What the blocks from one on, and the head, make of tokens."""
    for block in net.blocks[first:]:
        x = block(x)
    return net.forward_head(net.norm(x))


def attention(part: Any, x: Tensor) -> Tensor:
    """Softmax of queries times keys, written out; ``x`` goes into the part."""
    rows, count, width = x.shape
    q, k, _ = part.qkv(x).reshape(rows, count, 3, part.num_heads, width // part.num_heads).permute(2, 0, 3, 1, 4)
    return torch.softmax(part.q_norm(q) @ part.k_norm(k).transpose(-2, -1) * part.scale, dim=-1)


def body(x: Tensor, *layers: Any, **more: Any) -> Json:
    inputs = [tensor(row.numpy()) for row in x]
    return {"model": "vit", "layers": list(layers), "inputs": inputs, "encoding": "base64", **more}


def plain(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    with torch.no_grad():
        inner = upto(net, x, 1)
        return body(x, BLOCK, "."), {BLOCK: inner.numpy(), ".": after(net, inner, 2).numpy()}


def changed(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    with torch.no_grad():
        inner = upto(net, x, 0)
        inner[:, :, [2, 5]] = 0.0
        how = [{"layer": "blocks.0", "op": "zero", "channels": [2, 5]}]
        return body(x, ".", interventions=how), {".": after(net, inner, 1).numpy()}


def graded(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    start = x.clone().requires_grad_()
    inner = upto(net, start, 1)
    scores = after(net, inner, 2)
    first, last = torch.autograd.grad(scores[:, CLASS].sum(), [start, inner])
    wanted = {".:grad_input": first.numpy(), f"{BLOCK}:grad_output": last.numpy()}
    return body(x, *wanted, objective={"kind": "logit", "class": CLASS}), wanted


def attended(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    with torch.no_grad():
        inner = upto(net, x, 0)
        weights = attention(net.blocks[1].attn, net.blocks[1].norm1(inner))
        wanted = {f"{BLOCK}.attn:attention": weights.numpy(), BLOCK: upto(net, x, 1).numpy()}
        return body(x, *wanted), wanted


def attended_graded(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    open_ = copy.deepcopy(net)
    for block in open_.blocks:
        block.attn.fused_attn = False
    kept = []

    def keep(part: Any, args: Any) -> tuple[Tensor]:
        kept.append(args[0].requires_grad_())
        return (kept[0],)

    with open_.blocks[1].attn.attn_drop.register_forward_pre_hook(keep):
        scores = open_(x)
    (slope,) = torch.autograd.grad(scores[:, CLASS].sum(), kept)
    key = f"{BLOCK}.attn:attention_grad"
    return body(x, key, objective={"kind": "logit", "class": CLASS}), {key: slope.numpy()}


def clipped(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    start = upto(net, x, -1).detach().requires_grad_()
    inner = start
    for block in net.blocks[:2]:
        inner = block(inner)
    (slope,) = torch.autograd.grad(after(net, inner, 2)[:, CLASS].sum(), inner, retain_graph=True)
    limit = float(slope.abs().max()) / 4
    (wanted,) = torch.autograd.grad(inner, start, slope.clamp(-limit, limit))
    how = [{"layer": BLOCK, "site": "grad_output", "op": "clamp", "min": -limit, "max": limit}]
    key = "blocks.0:grad_input"
    return body(x, key, objective={"kind": "logit", "class": CLASS}, interventions=how), {key: wanted.numpy()}


def resumed(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    with torch.no_grad():
        inner = upto(net, x, 0) * 0.5
        return body(inner, ".", resume="blocks.0"), {".": after(net, inner, 1).numpy()}


def added(net: Any, x: Tensor) -> tuple[Json, dict[str, Array]]:
    block = net.blocks[1]
    with torch.no_grad():
        inner = upto(net, x, 0)
        key = f"{BLOCK}/add#0"
        return body(x, key), {key: (inner + block.ls1(block.attn(block.norm1(inner)))).numpy()}


KINDS: list[Kind] = [plain, changed, graded, attended, attended_graded, clipped, resumed, added]


def check(reply: Any, wanted: dict[str, Array]) -> None:
    found = arrays_of(reply)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        largest = float(np.abs(value).max())
        assert largest > 1e-6
        np.testing.assert_allclose(found[key], value, rtol=1e-3, atol=2e-5 * largest, err_msg=key)


def state(live: Live) -> list[Any]:
    """All that a hook or a backward could leave behind, where it can be seen."""
    model = live.engine.manager.registry.get_entry("vit").model
    assert model is not None
    assert model.hooks == 0
    if not isinstance(model, LoadedModel):
        return []
    return [
        (name, part.training, vars(part).get("fused_attn"), vars(part).get("forward"), sorted(vars(part)))
        for replica in model.replicas
        for name, part in replica.module.named_modules()
    ] + [
        (name, value.requires_grad, value.grad, value._version)
        for replica in model.replicas
        for name, value in replica.module.named_parameters()
    ]


def test_all_at_once(transformer: Live) -> None:
    """Nobody sees anybody; what they leave behind is nothing."""
    net, before = fused(), state(transformer)
    assert not before or any(fused for _, _, fused, *_ in before[: len(before) // 2])
    made = []
    for number in range(ROUNDS * len(KINDS)):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(1 + number % 3, 3, 32, 32, generator=generator)
        made.append(KINDS[number % len(KINDS)](net, x))
    random.Random(0).shuffle(made)
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda pair: transformer.client.post("/extract", json=pair[0]), made))
    for reply, (_, wanted) in zip(replies, made, strict=True):
        check(reply, wanted)
    assert state(transformer) == before
