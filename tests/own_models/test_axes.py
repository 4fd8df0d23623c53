"""Axes are named where operations prove them, else a request names them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec
from tests.own_models.ask import Asker, encode, hook, own, serving_models
from tests.own_models.axes_nets import NETS, make

# By net: a layer, and the axis of its channels.
CHANNELS = [
    ("flatten", "last", 1),
    ("shuffle", "last", 1),
    ("unfold", "last", 1),
    ("hwc", "last", 3),
    ("wave", "pre", 2),
    ("wave", "last", 1),
    ("einsum", "last", 3),
    ("mixer", ".", 2),
    ("mixer", "act", 1),
    ("video", "apart", 2),
    ("video", "frames", 2),
    ("heads", "query", 2),
    ("square", "norm", 3),
    ("square", "back", 1),
    ("eca", "scaled", 1),
]
# What has no axis for channels that anything proves, with the layout that a caller may give it.
UNKNOWN = [
    ("heads", "apart", "NATC", 3),
    ("depth", ".", "NHC", 2),
    ("spectrum", "pre", "NCT", 1),
    ("turned", "mix", "NCT", 1),
]


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    specs = [own("axes_nets", "make", InputSpec("x", NETS[name][1]), name=name, args={"name": name}) for name in NETS]
    with serving_models(*specs) as asker:
        yield asker


def see(name: str, layer: str) -> tuple[Tensor, Tensor]:
    """A row, and what plain PyTorch gives for it at a layer."""
    row = torch.randn(NETS[name][1], generator=torch.Generator().manual_seed(3))
    return row, hook(make(name), layer.removeprefix("."), row)[0]


def average(value: Tensor, axis: int) -> Tensor:
    return value.mean([each for each in range(1, value.ndim) if each != axis])


@pytest.mark.parametrize(("name", "layer", "axis"), CHANNELS)
def test_pooled_by_channel(asker: Asker, name: str, layer: str, axis: int) -> None:
    """The mean of a layer has one number for each of its channels, whatever its parts' types and sizes."""
    row, value = see(name, layer)
    reply = asker.extract(name, [row], [{"layer": layer, "pool": "mean"}])
    torch.testing.assert_close(reply.features[layer], average(value, axis), rtol=1e-4, atol=1e-5)


def test_a_function(asker: Asker) -> None:
    """What a function returns has the axes of what it was given, turned."""
    row, value = see("square", "norm")
    reply = asker.extract("square", [row], [{"layer": "./permute#1", "channels": [2], "pool": "none"}])
    torch.testing.assert_close(reply.features["./permute#1"], value.permute(0, 3, 1, 2)[:, [2]])


@pytest.mark.parametrize(("name", "layer", "layout", "axis"), UNKNOWN)
def test_unknown(asker: Asker, name: str, layer: str, layout: str, axis: int) -> None:
    """Channels that nothing proves are asked for, and a layout that is given is used and has its own fingerprint."""
    row, value = see(name, layer)
    refused = asker.extract(name, [row], [{"layer": layer, "pool": "mean"}])
    assert refused.status == 422
    assert "layout" in refused.problem
    assert str(list(value.shape)) in refused.problem
    asked = {"layer": layer, "pool": "mean", "layout": layout}
    reply = asker.extract(name, [row], [asked])
    torch.testing.assert_close(reply.features[layer], average(value, axis), rtol=1e-4, atol=1e-5)
    other = asker.extract(name, [row], [{**asked, "layout": swap(layout)}])
    assert other.body["fingerprint"] != reply.body["fingerprint"]


def swap(layout: str) -> str:
    """Another axis for the channels."""
    at, to = layout.index("C"), 1 if layout[1] != "C" else 2
    letters = list(layout)
    letters[at], letters[to] = letters[to], letters[at]
    return "".join(letters)


def test_a_layout_overrides(asker: Asker) -> None:
    """A layout replaces the one that was found, in queries and interventions too; the found one changes nothing."""
    row, value = see("flatten", "last")
    found, same, other = (
        asker.extract("flatten", [row], [{"layer": "last", "pool": "mean", **more}])
        for more in ({}, {"layout": "NCL"}, {"layout": "NTC"})
    )
    torch.testing.assert_close(other.features["last"], average(value, 2))
    assert found.body["fingerprint"] == same.body["fingerprint"] != other.body["fingerprint"]
    edit = {"layer": "last", "op": "zero", "channels": [3], "layout": "NTC"}
    changed = asker.extract("flatten", [row], ["last"], interventions=[edit])
    value[:, :, 3] = 0
    torch.testing.assert_close(changed.features["last"], value)


@pytest.mark.parametrize(
    ("layout", "said"), [("NCHW", "axes"), ("NXL", "NXL"), ("NCC", "once"), ("CNL", "rows"), ("CLL", "once")]
)
def test_wrong_layouts(asker: Asker, layout: str, said: str) -> None:
    """A layout has a letter for each axis, each once, N where the rows are; the error says what to write."""
    row, _ = see("flatten", "last")
    reply = asker.extract("flatten", [row], [{"layer": "last", "pool": "mean", "layout": layout}])
    assert reply.status == 422
    assert said in reply.problem


def test_no_embedding_of_unknown_channels(asker: Asker) -> None:
    """A depth map is no embedding without a word."""
    row, _ = see("depth", ".")
    reply = asker.post("/extract", {"model": "depth", "inputs": [encode(row)]})
    assert reply.status == 422
    assert "embedding" in reply.problem
