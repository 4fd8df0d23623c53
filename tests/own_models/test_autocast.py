"""A model that computes within autocast: what it computes stays in its dtypes, what is ours is in ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.spec import InputSpec
from tests.own_models import autocast_nets as nets
from tests.own_models.ask import Asker, encode, hook, own, serving_models

VECTOR, TOKENS = InputSpec("x", (64,)), InputSpec("x", (12, 32))
EXACT, ROUNDED = 1e-5, 1e-2  # of the largest number: float32, and bfloat16 on the way
SQUARE = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) / 8
SQUARE_JSON = {"weight": encode(SQUARE)["tensor"]}


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """All models of this file."""
    vectors = [own("autocast_nets", name, VECTOR) for name in ("Mixed", "Nested", "Checkpointed")]
    with serving_models(*vectors, own("autocast_nets", "Attending", TOKENS)) as asker:
        yield asker


def row(*shape: int) -> Tensor:
    """An input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def near(found: Tensor, right: Tensor, part: float = EXACT) -> None:
    """Equal up to a part of the largest number."""
    torch.testing.assert_close(found, right.float(), rtol=0, atol=part * float(right.abs().max()))


@pytest.mark.parametrize(
    ("model", "layer", "dtype"),
    [
        ("Mixed", "norm", torch.float32),
        ("Mixed", "first", torch.bfloat16),
        ("Nested", "inner", torch.float16),
        ("Nested", "full", torch.float32),
        ("Nested", "norm", torch.float32),
        ("Checkpointed", "norm", torch.float32),
    ],
)
def test_reductions(asker: Asker, model: str, layer: str, dtype: torch.dtype) -> None:
    """A layer is as autocast makes it, and its projection, statistics and norm are those of float32."""
    x, module = row(64), getattr(nets, model)().eval()
    (value,) = hook(module, layer, x)
    assert value.dtype == dtype
    wide = value.float()
    near(asker.extract(model, [x], [layer]).features[layer], wide, 0.0)
    asked = {
        "project": SQUARE_JSON,
        "stats": ["mean", "std", "l2"],
        "normalize": True,
    }
    right = {
        "project": wide @ SQUARE.T,
        "stats": torch.stack([wide.mean(1), wide.std(1, correction=0), wide.norm(dim=1)], 1),
        "normalize": functional.normalize(wide, dim=-1),
    }
    for option, given in asked.items():
        more = {"pool": "flatten"} if option == "normalize" else {}
        reply = asker.extract(model, [x], [{"layer": layer, option: given, **more}])
        near(reply.features[layer], right[option])


def test_functions(asker: Asker) -> None:
    """What a function returns within autocast is projected in float32 too."""
    x, module = row(64), nets.Mixed().eval()
    (value,) = hook(module, "first", x)
    reply = asker.extract("Mixed", [x], [{"layer": "./relu", "project": SQUARE_JSON}])
    near(reply.features["./relu"], value.relu().float() @ SQUARE.T)


@pytest.mark.parametrize(("model", "layer"), [("Mixed", "norm"), ("Nested", "full"), ("Checkpointed", "norm")])
def test_changes_and_gradients(asker: Asker, model: str, layer: str) -> None:
    """A layer replaced by its projection, and the gradient through that, also where the layer runs a second time."""
    x, module = row(64), getattr(nets, model)().eval()

    def project(part: nn.Module, args: object, value: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return value @ SQUARE.T

    module.get_submodule(layer).register_forward_hook(project)
    (changed,) = hook(module, layer, x)
    change = {"layer": layer, "op": "replace", "project": SQUARE_JSON}
    reply = asker.extract(model, [x], [layer, "."], interventions=[change])
    near(reply.features[layer], changed)
    leaf = x[None].clone().requires_grad_()
    output = module(leaf)
    near(reply.features["."], output.detach(), 1e-6)
    output.float()[0, 3].backward()
    assert leaf.grad is not None
    objective = {"kind": "logit", "class": 3}
    reply = asker.extract(model, [x], [".:grad_input"], interventions=[change], objective=objective)
    near(reply.features[".:grad_input"], leaf.grad, ROUNDED)


@pytest.mark.parametrize("layer", ["norm", "first"])
def test_objectives(asker: Asker, layer: str) -> None:
    """An objective of a layer within autocast is computed in float32."""
    x, module = row(64), nets.Mixed().eval()
    leaf, seen = x[None].clone().requires_grad_(), list[Tensor]()
    module.get_submodule(layer).register_forward_hook(lambda part, args, value: seen.append(value))
    module(leaf)
    seen[0].float().norm().backward()
    assert leaf.grad is not None
    reply = asker.extract("Mixed", [x], [".:grad_input"], objective={"kind": "norm", "layer": layer})
    near(reply.features[".:grad_input"], leaf.grad, EXACT if layer == "norm" else ROUNDED)


def test_attention(asker: Asker) -> None:
    """Weights are those of the kernel's bfloat16, observed or in place of the kernel; so is what is made of them."""
    x, module = row(12, 32) * 2, nets.Attending().eval()
    (normed,) = hook(module, "attention.norm", x)
    q = normed.unflatten(-1, (4, 8)).transpose(1, 2).mul(3).bfloat16()
    weights = (q.float() @ q.roll(1, 2).float().transpose(-1, -2) / 8**0.5).softmax(-1)
    reply = asker.extract("Attending", [x], ["attention:attention", "attention"])
    near(reply.features["attention:attention"], weights, 8e-3)
    (out,) = hook(module, "attention", x)
    near(reply.features["attention"], out, 0.0)
    change = {"layer": "attention", "site": "attention", "op": "scale", "by": 0.5, "heads": [1]}
    reply = asker.extract("Attending", [x], ["attention"], interventions=[change])
    half = out.float().unflatten(-1, (4, 8))
    half[:, :, 1] *= 0.5
    near(reply.features["attention"], half.flatten(2), ROUNDED)
