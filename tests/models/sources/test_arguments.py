"""Constructor arguments of a configuration, against modules that are constructed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import get_model

from layertap.models.errors import LoadError
from layertap.models.fingerprint import digest_architecture
from layertap.models.sources.build import BuiltModel, build_model
from layertap.models.spec import InputSpec, ModelSpec
from tests.transformers_nets import TEXT, saved

CLASSES = 10
VECTOR = (InputSpec("x", (4,)),)
OWN = """
from torch import nn

def linear(width, bias=True):
    return nn.Linear(4, width, bias=bias)

def anything(**options):
    return nn.Linear(4, options["width"])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's module of factories that take arguments."""
    (tmp_path / "own_with_arguments.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def built(source: str, weights: str | Path = "random:0", **fields: Any) -> BuiltModel:
    return build_model(ModelSpec("m", source, str(weights), **fields))


def refused(source: str, weights: str | Path = "random:0", **fields: Any) -> str:
    with pytest.raises(LoadError) as caught:
        built(source, weights, **fields)
    said = f"{caught.value.detail} | {caught.value.hint}"
    assert "/" not in said
    return said


def digest(model: BuiltModel) -> str:
    return digest_architecture(model.module, model.architecture, model.settings)


def compute(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        value = module.eval()(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(1, *shape))
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize(
    ("source", "make"),
    [
        ("torchvision:squeezenet1_1", partial(get_model, "squeezenet1_1")),
        ("timm:resnet18", partial(timm.create_model, "resnet18")),
    ],
    ids=["torchvision", "timm"],
)
def test_fine_tuned_checkpoint(source: str, make: Callable[..., nn.Module], tmp_path: Path) -> None:
    """A checkpoint of ten classes is refused with the line to type, and is the model that was saved with that line."""
    module = make(num_classes=CLASSES)
    state, file = module.state_dict(), tmp_path / "fine.safetensors"
    save_file(state, file)
    assert "type args: {num_classes: 10}" in refused(source, file)
    model = built(source, file, args={"num_classes": CLASSES})
    shape = model.inputs[0].shape
    assert torch.equal(compute(model.module, shape), compute(module, shape))
    save_file({name: value for name, value in state.items() if name != next(iter(state))}, file)
    assert "num_classes" not in refused(source, file)  # heads are not all that differs


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("torchvision:resnet18", {"num_clases": 10}, "takes no argument 'num_clases' | did you mean 'num_classes'"),
        # This class ignores what it does not know.
        ("torchvision:mobilenet_v3_small", {"num_clases": 10}, "did you mean 'num_classes'"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "type weights: beside args:"),
        ("torchvision:resnet18", {"num_classes": "ten"}, "could not be built (TypeError)"),
        ("timm:resnet18", {"in_chan": 1}, "did you mean 'in_chans'"),
    ],
)
def test_refused_arguments(source: str, args: dict[str, Any], words: str) -> None:
    """What a constructor does not take, or another field decides, is refused with what to type."""
    assert words in refused(source, args=args)


@pytest.mark.usefixtures("own")
def test_own_factory() -> None:
    """A factory is called with its arguments; what it does not take, or lacks, is named."""
    source = "python:own_with_arguments:linear"
    model = built(source, inputs=VECTOR, args={"width": 3, "bias": False})
    assert isinstance(model.module, nn.Linear)
    assert (model.module.out_features, model.module.bias) == (3, None)
    assert "takes no argument 'widht' | did you mean 'width'" in refused(source, inputs=VECTOR, args={"widht": 3})
    assert "type args: {width: …}" in refused(source, inputs=VECTOR)
    assert built("python:own_with_arguments:anything", inputs=VECTOR, args={"width": 5}).module.out_features == 5
    assert "(KeyError)" in refused("python:own_with_arguments:anything", inputs=VECTOR, args={"widht": 5})


def test_transformers_configuration(tmp_path: Path) -> None:
    """Arguments override config.json: a checkpoint of another number of labels is served."""
    folder = tmp_path / "classifier"
    saved("classifier", folder)
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=7)).eval()
    save_file(dict(module.state_dict()), tmp_path / "seven.safetensors")
    source = f"transformers:{folder}"
    assert "type args: {num_labels: 7}" in refused(source, tmp_path / "seven.safetensors")
    model = built(source, tmp_path / "seven.safetensors", args={"num_labels": 7})
    words = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(model.module(words).logits, module(words).logits)
    assert "did you mean 'num_labels'" in refused(source, args={"num_label": 7})
    assert "dtype: beside args:" in refused(source, args={"dtype": "float16"})
    changed = built(source, args={"hidden_act": "relu"})
    assert digest(changed) != digest(built(source))
