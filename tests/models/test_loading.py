"""What loading must not do: depend on other loads, lose numbers, hang."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layertap.models import fingerprint
from layertap.models.errors import LoadError
from layertap.models.registry import Registry
from layertap.models.spec import InputSpec, ModelSpec
from layertap.models.weights.state_dict import digest_weights
from tests.loading import load_model

ROW = (InputSpec("x", (4,)),)
HERE = "python:tests.models.test_loading"


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


def test_a_factory_that_exits() -> None:
    """Whatever a factory raises, its model has failed and says so."""
    registry = Registry([spec("leaves", weights="random:0")])
    with pytest.raises(LoadError, match=r"could not be built|SystemExit"):
        registry.load("net")
    assert registry.get_entry("net").state == "failed"


def test_what_no_checkpoint_holds_counts() -> None:
    """Buffers outside the state dict and settings that are not printed are part of a model's fingerprint."""
    assert digest_weights(Mode(scale=1.0)) != digest_weights(Mode(scale=2.0))
    assert fingerprint.digest_architecture(Mode("a"), "s") != fingerprint.digest_architecture(Mode("b"), "s")
