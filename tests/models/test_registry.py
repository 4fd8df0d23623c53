"""Configured models: what becomes of each."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

from layertap.models.errors import LoadError
from layertap.models.planner import make_plan
from layertap.models.registry import Registry
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import net_spec
from tests.models.extraction import extract_plan
from tests.nets import batch

VECTOR = (InputSpec("x", (4,)),)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(net_spec("Chain"), source="python:tests.nets:Chian"), "no factory 'Chian'; did you mean"),
        (net_spec("Chain", inputs=VECTOR), "can't take an input of this shape"),
        (net_spec("Chain", weights="nowhere.safetensors"), "no checkpoint 'nowhere.safetensors'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.source,
)
def test_failed(spec: ModelSpec, reason: str) -> None:
    """What can't be loaded is failed and says why, whoever raised what, and shows no path."""
    registry = Registry([spec])
    for _ in range(2):
        with pytest.raises(LoadError):
            registry.load(spec.name)
        entry = registry.get_entry(spec.name)
        assert (entry.state, entry.model) == ("failed", None)
        assert reason in entry.reason
        assert "/" not in entry.reason


def test_unloaded_is_freed() -> None:
    """Nothing holds an unloaded model's module: its memory is free at once, also after it ran."""
    registry = Registry([net_spec("resnet")])
    model = registry.load("resnet")
    plan = make_plan([parse_selector("layer1"), parse_selector("bn1:input")], model.catalog)
    extract_plan(model, batch(model.inputs, 2), plan, model.catalog, 1)
    module = weakref.ref(model.module)
    del model
    registry.unload("resnet")
    assert module() is None


def test_duplicate() -> None:
    """Two models of one name are refused before anything is loaded."""
    with pytest.raises(LoadError, match="two models are called 'Chain'"):
        Registry([net_spec("Chain"), net_spec("Chain", weights="random:1")])


def test_states() -> None:
    """A model is available, then ready; unloaded it is available and can be loaded again."""
    registry = Registry([net_spec("Tied")])
    assert registry.get_entry("Tied").state == "available"
    for _ in range(2):
        assert registry.get_entry("Tied").model is None
        model = registry.load("Tied")
        assert (registry.get_entry("Tied").state, registry.get_entry("Tied").model) == ("ready", model)
        registry.unload("Tied")
        assert registry.get_entry("Tied").state == "available"
