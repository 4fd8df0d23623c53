"""The service in the shape of ``create_feature_extractor``: what a local one gives is what it gives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import layertap_client as lt
from layertap.models.digits.architecture import Digits
from tests.client.misbehaving_server import misbehaving, relay
from tests.server import Live, serving
from tests.service.support import configured, net

NODES = {"block2": "middle", "flatten": "vector", "head": "head"}
BATCH = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def local(live: Live) -> Any:
    """Torchvision's own extractor of a copy of the server's model."""
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    copy = Digits()
    copy.load_state_dict(model.module.state_dict())
    return create_feature_extractor(copy.eval(), return_nodes=NODES)


@pytest.fixture
def extractor(live: Live) -> Iterator[lt.RemoteExtractor]:
    made = lt.hooks("digits", return_nodes=NODES, url=live.url)
    yield made
    made.close()


def test_one_line(local: Any, extractor: lt.RemoteExtractor) -> None:
    """Same names, same order, same shapes, same values; tensors for tensors."""
    with torch.no_grad():
        expected = local(BATCH)
    given = extractor.eval().to("cpu")(BATCH)
    assert isinstance(given, OrderedDict)
    assert list(given) == list(expected)
    for name, tensor in expected.items():
        assert given[name].device == tensor.device
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-5)


def test_batches_beyond_the_limits(live: Live) -> None:
    """A batch of any size goes in as many requests as it takes, whatever the limit is of."""
    rows = torch.randn(30, 3, 32, 32)
    limits: list[dict[str, int]] = [{"max_inputs": 7}, {"max_reply_bytes": 400_000}]
    with lt.Client(live.url) as client:
        expected = lt.hooks("digits", NODES, client=client)(rows)
    for limit in limits:
        with serving(**limit) as narrow, lt.Client(narrow.url) as client:
            given = lt.hooks("digits", NODES, client=client)(rows)
        for name, tensor in expected.items():
            torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-5)


def test_named_inputs(live: Live) -> None:
    """Models of several inputs take them by name."""
    named = {"pixels": torch.ones(3, 4), "kind": torch.tensor([0, 1, 2])}
    with lt.Client(live.url) as client:
        given = lt.hooks("two", ["."], client=client)(**named)
        expected = client.extract({"tensors": named}, ".", model="two")
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == {
        name: array.shape for name, array in expected.items()
    }
    assert all(isinstance(tensor, torch.Tensor) for tensor in given.values())


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (BATCH.clone().requires_grad_(), "no gradient flows back"),
        (torch.zeros(0, 3, 32, 32), "give a batch"),
    ],
)
def test_what_can_not_be(extractor: lt.RemoteExtractor, batch: torch.Tensor, words: str) -> None:
    """What would give something else than a local extractor is refused."""
    with pytest.raises(lt.InputError, match=words):
        extractor(batch)


def test_another_model_within_a_batch() -> None:
    """Rows of two models are never put together."""
    first, second = (configured(net("m", "Gated", weights=f"random:{seed}")) for seed in (0, 1))
    with (
        serving(first, max_inputs=2) as one,
        serving(second, max_inputs=2) as other,
        misbehaving(relay(one.url), relay(one.url), relay(other.url)) as server,
        lt.Client(server.url) as client,
    ):
        extractor = lt.hooks("m", ["linear"], client=client)
        with pytest.raises(lt.FingerprintChangedError):
            extractor(torch.ones(4, 4))
