"""What a model, a caller or a hook did wrong is answered as theirs, with what was raised and where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.own_models import fault_nets as nets
from tests.own_models.ask import Asker, Reply, hook, own, serving_models

NAMES = ("Empty", "Picky", "OnlyWithoutGraph", "Sealing")
OBJECTIVE = {"kind": "logit", "class": 1}


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """All models of this file that stay as they are."""
    backwards = [
        own("fault_nets", "OwnBackward", name=kind, args={"error": kind}) for kind in ("ValueError", "RuntimeError")
    ]
    with serving_models(*(own("fault_nets", name) for name in NAMES), *backwards) as asker:
        yield asker


def row(size: float = 1.0) -> Tensor:
    """An input."""
    return torch.ones(8) * size


def check(reply: Reply, status: int, kind: str, *words: str) -> None:
    """A problem of a kind that says these words, and no folder."""
    assert (reply.status, reply.body["type"].rpartition(":")[2]) == (status, kind), reply.problem
    assert all(word in reply.problem for word in words), reply.problem
    assert "/srv" not in reply.problem
    assert "own_models" not in reply.problem


@pytest.mark.parametrize("pool", ["mean", "max", "gem", "last"])
@pytest.mark.parametrize("layer", ["boxes", "none_asked[0]"])
def test_empty_axis(asker: Asker, layer: str, pool: str) -> None:
    """Pooling along an axis that is always empty is refused with its name; the rest can be had."""
    reply = asker.extract("Empty", [row()], [{"layer": layer, "pool": pool}])
    check(reply, 422, "invalid-request", "axis 1", f"is empty: it has no '{pool}'", "'none'")
    reply = asker.extract("Empty", [row()], [layer, {"layer": layer, "pool": "flatten", "as": "flat"}])
    assert reply.features[layer].shape[1] == 0
    assert reply.features["flat"].shape == (1, 0)


def test_empty_attention(asker: Asker) -> None:
    """Attention without a query has weights of that shape."""
    reply = asker.extract("Empty", [row()], ["none_asked:attention"])
    assert reply.status == 200, reply.problem
    assert reply.features["none_asked:attention"].shape == (1, 2, 0, 1)


def test_values(asker: Asker) -> None:
    """Values that a model refuses are the caller's fault, and so is a change that makes them; the model says why."""
    words = ("does not take these values", "ValueError at fault_nets.py:", "of 8 features\\nare too large, see ...")
    check(asker.extract("Picky", [row(1e4)], ["check"]), 422, "invalid-request", *words)
    change = {"layer": "first", "op": "scale", "by": 1e6}
    check(asker.extract("Picky", [row()], ["check"], interventions=[change]), 422, "invalid-request", *words)
    check(asker.extract("Picky", [row(1e4)], [".:grad_input"], objective=OBJECTIVE), 422, "invalid-request", *words)
    (right,) = hook(nets.Picky().eval(), "check", row())
    torch.testing.assert_close(asker.extract("Picky", [row()], ["check"]).features["check"], right)


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_own_backward(asker: Asker, kind: str) -> None:
    """A backward of the model's own that raises for any values is the model's fault."""
    reply = asker.extract(kind, [row()], [".:grad_input"], objective=OBJECTIVE)
    check(reply, 500, "model-raised", f"{kind} at fault_nets.py:", "of its own backward")


def test_own_forward(asker: Asker) -> None:
    """So is a forward that raises for any values where it keeps a graph."""
    reply = asker.extract("OnlyWithoutGraph", [row()], [".:grad_input"], objective=OBJECTIVE)
    check(reply, 500, "model-raised", "IndexError at fault_nets.py:", "no graph here")
    assert asker.extract("OnlyWithoutGraph", [row()], ["first"]).status == 200


def test_hook(asker: Asker, caplog: pytest.LogCaptureFixture) -> None:
    """What a hook raises is a bug of the server's, whole in its log; a model that catches errors does not hide it."""
    assert asker.extract("Sealing", [row()], ["seal"]).status == 200
    reply = asker.extract("Sealing", [row(1e4)], ["seal"])
    check(reply, 500, "bug", "its log has the details")
    (logged,) = [record for record in caplog.records if record.message == "bug"]
    assert logged.exc_info is not None
    assert "sealed" in caplog.text
    assert asker.extract("Sealing", [row()], ["seal"]).status == 200


def test_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no values please any more says so, and is not taken for one that minds these values."""
    monkeypatch.setattr(nets, "SPOILT", [])
    with serving_models(own("fault_nets", "Spoilt")) as asker:
        assert asker.extract("Spoilt", [row()], ["first"]).status == 200
        reply = asker.extract("Spoilt", [row(12345.0)], ["first"])
        check(reply, 503, "unavailable", "whatever it is given (IndexError)")
