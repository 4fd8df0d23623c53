"""Configured models: what becomes of each."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.registry import Registry
from layertap.models.run import fingerprint
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import net_spec
from tests.loading import load_model
from tests.models.extraction import extract_plan
from tests.nets import batch

VECTOR = (InputSpec("x", (4,)),)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(net_spec("Chain"), source="python:tests.nets:Chian"), "no factory 'Chian'; did you mean"),
        (net_spec("Chain", inputs=VECTOR), "can't take an input of this shape"),
        (net_spec("Chain", weights="nowhere.safetensors"), "no checkpoint 'nowhere.safetensors'"),
        (replace(net_spec("Chain"), source="python:tests.models.test_registry:leaves"), "SystemExit"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.source,
)
def test_failed(spec: ModelSpec, reason: str) -> None:
    """What can't be loaded says why, whoever raised what, and shows no path."""
    with pytest.raises(LoadError) as raised:
        Registry([spec], load_model).load_model(spec)
    said = f"{raised.value.detail}; {raised.value.hint}"
    assert reason in said
    assert "/" not in said


def test_unloaded_is_freed() -> None:
    """Nothing holds an unloaded model's module: its memory is free at once, also after it ran."""
    model = load_model(net_spec("resnet"))
    plan = make_plan([parse_selector("layer1"), parse_selector("bn1:input")], model.catalog)
    extract_plan(model, batch(model.inputs, 2), plan, model.catalog, 1)
    module = weakref.ref(model.module)
    del model
    assert module() is None


ROW = (InputSpec("x", (4,)),)
HERE = "python:tests.models.test_registry"


class Turned(nn.Module):
    """A complex buffer, as rotary positions have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.linear(x) * self.turn).flatten(1)


class Mode(nn.Module):
    """A setting that it does not print, and a buffer that no checkpoint holds."""

    def __init__(self, mode: str = "a", scale: float = 1.0) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("scale", torch.tensor(scale), persistent=False)


def leaves() -> nn.Module:
    """A factory that ends the process."""
    raise SystemExit(3)


def spec(factory: str, **fields: object) -> ModelSpec:
    return ModelSpec("net", f"{HERE}:{factory}", inputs=ROW, device="cpu", **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_complex_buffers_stay_complex(dtype: str) -> None:
    """A model's dtype is that of its real numbers: complex ones keep both of their parts."""
    model = load_model(spec("Turned", dtype=dtype, weights="random:0"))
    assert model.module.get_buffer("turn").is_complex()


def test_what_no_checkpoint_holds_counts() -> None:
    """Buffers outside the state dict and settings that are not printed are part of a model's fingerprint."""
    assert digest_weights(Mode(scale=1.0)) != digest_weights(Mode(scale=2.0))
    assert fingerprint.digest_architecture("s", module=Mode("a")) != fingerprint.digest_architecture(
        "s", module=Mode("b")
    )
