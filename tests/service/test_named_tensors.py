"""Models of several inputs: arrays by name in JSON and in safetensors bodies, with one meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, net, problem, raw, safetensors_of, tensor

PIXELS, KIND = np.arange(12, dtype=np.float32).reshape(3, 4) / 7, np.array([0, 4, 2])
QUERY = {"model": "two", "layers": "."}


def tensors(**arrays: Any) -> Json:
    """An entry of ``inputs``."""
    return {"tensors": {name: tensor(np.asarray(array))["tensor"] for name, array in arrays.items()}}


ITEMS = [tensors(pixels=pixels, kind=kind) for pixels, kind in zip(PIXELS, KIND, strict=True)]


@pytest.fixture(scope="module")
def two(serve: Serve) -> Iterator[Live]:
    """A server of models of two inputs; it takes no more than three at once."""
    kinds = InputSpec("kind", (), "int64", values=(0, 5))
    two = net("two", "TwoInputs", InputSpec("pixels", (4,)), kinds)
    with serve(configured(two), max_inputs=3) as live:
        yield live


def post(live: Live, *inputs: Json, **fields: Any) -> Any:
    body = {"model": "two", "layers": ["."], "inputs": list(inputs), **fields}
    return live.client.post("/extract", json=body)


def send(live: Live, arrays: dict[str, Array], **query: str) -> Any:
    request = raw(safetensors_of(**arrays), "application/x-safetensors", **{**QUERY, **query})
    return live.client.post("/extract", **request)


def close(found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return found.keys() == wanted.keys() and all(np.allclose(found[key], wanted[key], atol=1e-6) for key in wanted)


def test_one_meaning(two: Live) -> None:
    """JSON and safetensors give the same, rows in a batch or a single one."""
    model = two.engine.manager.registry.get_entry("two").model or two.engine.manager.registry.load("two")
    offline = model.module(pixels=torch.from_numpy(PIXELS), kind=torch.from_numpy(KIND))
    wanted = {f".[{key}]": value.detach().numpy() for key, value in offline.items()}
    replies = [post(two, *ITEMS), send(two, {"pixels": PIXELS, "kind": KIND})]
    assert all(close(arrays_of(reply), wanted) for reply in replies)
    assert {reply.json()["rows"] for reply in replies} == {3}
    assert len({reply.json()["fingerprint"] for reply in replies}) == 1
    single = send(two, {"pixels": PIXELS[1], "kind": np.array(KIND[1])})
    assert close(arrays_of(single), {key: array[1:2] for key, array in wanted.items()})


BAD: dict[str, tuple[Json, str]] = {
    "unknown": (tensors(pixel=PIXELS[0], kind=1), "did you mean 'pixels'"),
    "missing": (tensors(pixels=PIXELS[0]), "'kind'"),
    "dtype": (tensors(pixels=PIXELS[0], kind=1.0), "takes int64"),
    "values": (tensors(pixels=PIXELS[0], kind=7), "7, which is not among its values"),
    "not finite": (tensors(pixels=np.full(4, np.inf, np.float32), kind=1), "infinite"),
    "very many": ({"tensors": {f"x{place}": tensor(PIXELS)["tensor"] for place in range(65)}}, "at most 64"),
    "strange": (tensors(**{"\r\nX-Evil: 1\0/../": 1}), "kind, pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(two: Live, name: str) -> None:
    """What is wrong with a tensor by name is told with what to send instead."""
    item, says = BAD[name]
    found = problem(post(two, item), 422)
    assert says in str(found["errors"])


BAD_ARRAYS: dict[str, tuple[dict[str, Array], str]] = {
    "missing": ({"pixels": PIXELS}, "'kind'"),
    "other rows": ({"pixels": PIXELS, "kind": KIND[:2]}, "different numbers of rows"),
    "values": ({"pixels": PIXELS, "kind": KIND + 9}, "not among its values"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_refused_arrays(two: Live, name: str) -> None:
    """What is wrong with an array is told by its name."""
    arrays, says = BAD_ARRAYS[name]
    assert says in str(problem(send(two, arrays), 422)["errors"])
