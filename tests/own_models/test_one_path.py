"""A model computes in one way, whatever is asked for beside a request: no hook and no gradient of others rounds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.engine.schedule.batch_key_cache import BatchKeyCache
from layertap.service.settings import Settings
from tests.loading import load_model
from tests.own_models import path_nets as nets
from tests.own_models.ask import Asker, encode, own, serving_models

TEXT = (InputSpec("x", (6, 16)), InputSpec("pad", (6,), "bool"))
PAD = torch.tensor([False, False, False, False, True, True])
LOGIT = Objective("logit", klass=1)


def encoder(activation: str) -> ModelSpec:
    """The entry of an encoder."""
    return own("path_nets", "Encoder", *TEXT, name=activation, args={"activation": activation})


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """Encoders by their activation."""
    torch.backends.mha.set_fastpath_enabled(True)  # as torch begins, whatever was loaded before
    with serving_models(*map(encoder, nets.ACTIVATIONS)) as asker:
        yield asker


def draw(*shape: int, seed: int = 3) -> Tensor:
    """An input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(activation: str, x: Tensor, pad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Layers of a row and the gradient of a sum, as torch computes them where weights may be trained."""
    module, seen = nets.Encoder(activation).eval(), dict[str, Tensor]()
    for name in ("encoder.layers.0.linear1", "encoder.layers.1", "encoder"):
        part = module.get_submodule(name)
        part.register_forward_hook(lambda part, args, out, name=name: seen.update({name: out.detach().clone()}))
    leaf = x[None].clone().requires_grad_()
    module(leaf, pad[None]).square().sum().backward()
    assert leaf.grad is not None
    return seen, leaf.grad


@pytest.mark.parametrize("activation", nets.ACTIVATIONS)
def test_fused_layers(asker: Asker, activation: str) -> None:
    """Torch's fused layers, which take an activation for another one, run for nobody; padding stays as torch has it."""
    x = draw(6, 16)
    right, gradient = plain(activation, x, torch.zeros_like(PAD))
    rows = [{"tensors": {"x": encode(x)["tensor"], "pad": encode(torch.zeros_like(PAD))["tensor"]}}]
    for layers in (["encoder"], ["encoder.layers.1"], list(right)):
        reply = asker.extract(activation, rows, layers)
        for layer in layers:
            torch.testing.assert_close(reply.features[layer], right[layer], rtol=1e-5, atol=1e-6)
    asked = {"objective": {"kind": "norm", "layer": "encoder"}}
    reply = asker.extract(activation, rows, [".[x]:grad_input"], **asked)
    assert reply.status == 200, reply.problem
    norm = right["encoder"].norm()
    torch.testing.assert_close(reply.features[".[x]:grad_input"], gradient / norm / 2, rtol=1e-4, atol=1e-5)


def test_padding(asker: Asker) -> None:
    """At padded positions an encoder returns 0 without a gradient and its plain values with one, as torch does."""
    x = draw(6, 16)
    rows = [{"tensors": {"x": encode(x)["tensor"], "pad": encode(PAD)["tensor"]}}]
    right, gradient = plain("relu", x, PAD)
    found = asker.extract("relu", rows, ["encoder"]).features["encoder"]
    torch.testing.assert_close(found[:, :4], right["encoder"][:, :4], rtol=1e-5, atol=1e-6)
    assert not found[:, 4:].any()
    assert right["encoder"][:, 4:].abs().min() > 0
    asked = {"objective": {"kind": "norm", "layer": "encoder"}}
    reply = asker.extract("relu", rows, [".[x]:grad_input", "encoder:grad_output", "encoder"], **asked)
    assert reply.status == 200, reply.problem
    torch.testing.assert_close(reply.features["encoder"], right["encoder"], rtol=1e-5, atol=1e-6)
    norm = right["encoder"].norm()
    torch.testing.assert_close(reply.features[".[x]:grad_input"], gradient / norm / 2, rtol=1e-4, atol=1e-5)


def run_beside(model: LoadedModel, rows: dict[str, Tensor], mine: Plan, other: Plan) -> dict[str, Tensor]:
    """What a request for the second row gets in a forward that it shares with one for the first."""
    pieces = [{name: value[index : index + 1] for name, value in rows.items()} for index in range(2)]
    slices = [
        RequestSlice(index, index + 1, plan.captures, plan.resolved_interventions, plan.objective)
        for index, plan in enumerate((other, mine))
    ]
    found = model.run(model.replicas[0], pieces, slices).select(slices[1])
    return {result.key: found[result.capture].values for result in mine.results}


def plans(model: LoadedModel, layers: Sequence[str], changed: str = "", objective: Objective | None = None) -> Plan:
    """A request's plan, perhaps with a layer that it changes."""
    changes = [Intervention(parse_selector(changed), Operation("scale", by=2.0))] if changed else []
    return make_plan([parse_selector(layer) for layer in layers], model.catalog, changes, objective)


def equal(found: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether all bits are the same."""
    return all(torch.equal(found[key], right[key]) for key in right)


@pytest.mark.parametrize(
    ("spec", "shapes", "changed"),
    [
        (encoder("tanh"), {"x": (2, 6, 16), "pad": ()}, ("encoder.layers.0.linear1", "encoder.layers.0.self_attn[0]")),
        (own("path_nets", "Turned", InputSpec("x", (3, 32, 32))), {"x": (2, 3, 32, 32)}, tuple("0123")),
    ],
    ids=["encoder", "turned"],
)
def test_neighbours(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], changed: tuple[str, ...]) -> None:
    """Whatever another request reads or changes in a forward that it shares, a row has the same bits."""
    torch.backends.mha.set_fastpath_enabled(True)
    model = load_model(spec)
    rows = {name: draw(*shape) if shape else PAD.repeat(2, 1) for name, shape in shapes.items()}
    mine = plans(model, ["."])
    right = run_beside(model, rows, mine, mine)
    names = [f"part#{each}" if each.isdigit() else each for each in changed]
    for name in names:
        assert equal(run_beside(model, rows, mine, plans(model, [name])), right)
        assert equal(run_beside(model, rows, mine, plans(model, [name], name)), right), name


def test_gradients_with_other_beginnings() -> None:
    """Requests whose graphs begin elsewhere do not share forwards: kernels look at what requires a gradient."""
    model = load_model(own("path_nets", "Biased", InputSpec("x", (17, 16))))
    early, late = (plans(model, [f"{name}:grad_output", "late"], objective=LOGIT) for name in ("early", "late"))
    rows = {"x": draw(2, 17, 16)}
    alone = run_beside(model, rows, late, late)
    assert not equal(run_beside(model, rows, late, early), alone)
    keys = BatchKeyCache(model, "biased", ["cpu"], Settings())
    shapes = model.model_inputs.shapes

    def key(plan: Plan) -> object:
        return keys.get(model.catalog, shapes, plan.anchors if plan.objective is not None else None)

    assert key(early) is key(plans(model, ["early:grad_output"], objective=LOGIT))
    assert len({id(key(plan)) for plan in (early, late, plans(model, ["late"]))}) == 3
