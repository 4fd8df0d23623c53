"""The ways in which attention and gradients go wrong: walked into and shown to be wrong, then ours shown right."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from layertap.models.errors import RequestError
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.loaded_model import LoadedModel
from tests.conftest import Loader
from tests.models.extraction import extract_captures, extract_plan
from tests.models.hooks.test_attention import timm_vit
from tests.models.run.test_gradients import split
from tests.models.run.test_traps import naive, ours, rows
from tests.nets import surveyed
from tests.oracle import record, seeded

LOGIT = Objective("logit", 2)


def gradients(model: LoadedModel, x: Tensor, *texts: str, objective: Objective = LOGIT) -> dict[str, Tensor]:
    """The project's gradients, by key."""
    return answers(model, x, make_plan([parse_selector(text) for text in texts], model.catalog, objective=objective))


def answers(model: LoadedModel, x: Tensor, plan: Plan) -> dict[str, Tensor]:
    """What a plan takes, by key."""
    taken = extract_plan(model, {"x": x}, plan, model.catalog, 64)
    return {result.key: taken[result.capture].values for result in plan.results}


def by_hand(net: Any, x: Tensor, klass: int = 2) -> list[Tensor]:
    """Gradients of a ResNet's logit at its input and after each of its stages, by autograd on the parts."""
    values = [x.clone().requires_grad_()]
    for part in split(net):
        values.append(part(values[-1].clone()))
    return list(torch.autograd.grad(values[-1][:, klass].sum(), values))


def same(found: Tensor, truth: Tensor) -> None:
    """Equal but for rounding, and not zero."""
    assert float(truth.abs().max()) > 0
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max()))


# Attention


def test_timms_fused_kernel_skips_its_dropout() -> None:
    """``attn_drop``, where weights would pass, never runs beside the fused kernel; ours come from q and k."""
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7)
    module = seeded(module.eval().requires_grad_(False), 5)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with naive(module, ["blocks.1.attn.attn_drop"]) as found:
        module(x)
    assert found == {}
    catalog = surveyed(module, 3, 32, 32, prefix=1)
    with pytest.raises(RequestError, match="never runs"):
        make_plan([parse_selector("blocks.1.attn.attn_drop")], catalog)
    plan = make_plan([parse_selector("blocks.1.attn:attention")], catalog)
    taken = extract_captures(Modules(module), lambda: module(x), plan.captures, 2)
    weights, _ = timm_vit(module.blocks[1].attn, record(module, x)["blocks.1.attn", 0, (), "input"])
    torch.testing.assert_close(next(iter(taken.values())).values, weights)


def test_a_projection_that_is_used_without_being_called(load_fresh_net: Loader) -> None:
    """``out_proj`` never fires: a dictionary simply lacks it. Ours says so, and names the part that does run."""
    model = load_fresh_net("vit")
    name = "encoder.layers.encoder_layer_0.self_attention.out_proj"
    with naive(model.module, [name]) as found:
        model.module(rows(model, 1))
    assert found == {}
    with pytest.raises(RequestError, match="never runs") as caught:
        ours(model, rows(model, 1), name)
    assert "self_attention'" in caught.value.hint


def test_gradients_arrive_last_layer_first(load_fresh_net: Loader) -> None:
    """A list filled by backward hooks, zipped with the layers in order, swaps them; ours carry names."""
    model = load_fresh_net("vit")
    x = rows(model, 2)
    net: Any = model.module
    names = [f"encoder.layers.encoder_layer_{number}" for number in range(2)]
    arrived: list[Tensor] = []
    parts = [net.get_submodule(name) for name in names]
    handles = [part.register_full_backward_hook(lambda _, before, after: arrived.append(after[0])) for part in parts]
    net(x.clone().requires_grad_())[:, 2].sum().backward()
    for handle in handles:
        handle.remove()
    found = gradients(model, x, *(f"{name}:grad_output" for name in names))
    tokens = torch.cat([net.class_token.expand(2, -1, -1), net._process_input(x)], 1) + net.encoder.pos_embedding
    first = parts[0](tokens).requires_grad_()
    second = parts[1](first)
    truth = torch.autograd.grad(net.heads(net.encoder.ln(second)[:, 0])[:, 2].sum(), [first, second])
    for place, name in enumerate(names):
        assert not torch.allclose(arrived[place], truth[place], rtol=0.1, atol=1e-4)
        same(arrived[1 - place], truth[place])
        same(found[f"{name}:grad_output"], truth[place])


# Backward hooks and in-place


def test_retain_grad_follows_what_is_written(load_fresh_net: Loader) -> None:
    """``retain_grad`` on a norm's output gives the gradient of what the in-place ReLU made of it; ours does not."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    net: Any = model.module
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = net.bn1.register_forward_hook(keep)
    net(x.clone().requires_grad_())[:, 2].sum().backward()
    handle.remove()
    norm = net.bn1(net.conv1(x)).requires_grad_()
    rest = split(net)[1:]
    out = net.relu(norm.clone())
    for part in rest:
        out = part(out)
    truth = torch.autograd.grad(out[:, 2].sum(), norm)[0]
    assert kept[0].grad is not None
    assert not torch.allclose(kept[0].grad, truth, rtol=0.1, atol=1e-6)
    assert torch.equal(truth[norm < 0], torch.zeros_like(truth[norm < 0]))
    assert bool((kept[0].grad[norm < 0] != 0).any())
    same(gradients(model, x, "bn1:grad_output")["bn1:grad_output"], truth)


# Frozen weights and an input without grad


def test_nothing_flows_where_nothing_asks_for_it(load_fresh_net: Loader) -> None:
    """A frozen model's backward raises and its hooks stay silent; ours asks for the gradient where it is wanted."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    net: Any = model.module
    assert not any(value.requires_grad for value in net.parameters())
    fired: list[Any] = []
    handle = net.layer2.register_full_backward_hook(lambda _, before, after: fired.append(after))
    out = net(x)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out[:, 2].sum().backward()
    handle.remove()
    assert fired == []
    truth = by_hand(net, x)
    found = gradients(model, x, ".:grad_input", "layer2:grad_output", "fc:grad_output")
    for got, wanted in zip(found.values(), (truth[0], truth[3], truth[6]), strict=True):
        same(got, wanted)
    assert not any(value.requires_grad for value in net.parameters())
    assert not x.requires_grad


# Tensors of inference mode


def test_inference_tensors_are_of_no_use_later(load_fresh_net: Loader) -> None:
    """What was taken in inference mode can neither be hooked nor differentiated; ours choose the mode by batch."""
    model = load_fresh_net("resnet")
    x = rows(model, 2)
    net: Any = model.module
    with torch.inference_mode():
        features = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
    with pytest.raises(RuntimeError, match="doesn't require grad"):
        features.register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError, match="inference tensor"):
        features.requires_grad_()
    head = nn.Linear(features.shape[-1], 1)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        head(features)
    plain = ours(model, x, "layer1")["layer1"]
    found = gradients(model, x, "layer1", "layer1:grad_output")
    assert not plain.is_inference()
    assert torch.equal(plain, features)
    torch.testing.assert_close(found["layer1"], features)
    same(found["layer1:grad_output"], by_hand(net, x)[2])
    assert torch.equal(ours(model, x, "layer1")["layer1"], features)
    head(plain).sum().backward()


# Degenerate seeded weights


def test_torchvisions_transformer_starts_its_head_at_zero(load_fresh_net: Loader) -> None:
    """By its own seeded weights every logit and gradient of a ViT is 0, right or wrong; ours are tested on others."""
    torch.manual_seed(0)
    fresh = VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=7).eval()
    model = load_fresh_net("vit")
    x = rows(model, 2)
    start = x.clone().requires_grad_()
    logits = fresh(start)
    assert not logits.any()
    assert not torch.autograd.grad(logits[:, 2].sum(), start)[0].any()
    start = x.clone().requires_grad_()
    truth = torch.autograd.grad(model.module(start)[:, 2].sum(), start)[0]
    assert all(row.unique().numel() == 7 for row in ours(model, x, ".")["."])
    assert all(row.any() for row in truth)
    same(gradients(model, x, ".:grad_input")[".:grad_input"], truth)
