"""Models of several inputs: arrays by name in JSON and in safetensors bodies, with one meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import Array, Json, arrays_of, copy_module, net, problem, raw, safetensors_of, tensors

PIXELS, KIND = np.arange(12, dtype=np.float32).reshape(3, 4) / 7, np.array([0, 4, 2])


ITEMS = [tensors(pixels=pixels, kind=kind) for pixels, kind in zip(PIXELS, KIND, strict=True)]


KINDS = InputSpec("kind", (), "int64", values=(0, 5))
two = server_of(net("two", "TwoInputs", InputSpec("pixels", (4,)), KINDS))


def post(live: Live, *inputs: Json) -> Any:
    return live.client.post("/extract", json={"model": "two", "layers": ["."], "inputs": list(inputs)})


def send(live: Live, arrays: dict[str, Array]) -> Any:
    content = safetensors_of(**arrays)
    return live.client.post("/extract", **raw(content, "application/x-safetensors", model="two", layers="."))


def close(found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return found.keys() == wanted.keys() and all(np.allclose(found[key], wanted[key], atol=1e-6) for key in wanted)


def test_one_meaning(two: Live) -> None:
    """JSON and safetensors give the same, rows in a batch or a single one."""
    module = copy_module(two, "two")
    offline = module(pixels=torch.from_numpy(PIXELS), kind=torch.from_numpy(KIND))
    wanted = {f".[{key}]": value.detach().numpy() for key, value in offline.items()}
    replies = [post(two, *ITEMS), send(two, {"pixels": PIXELS, "kind": KIND})]
    assert all(close(arrays_of(reply), wanted) for reply in replies)
    assert {reply.json()["rows"] for reply in replies} == {3}
    assert len({reply.json()["fingerprint"] for reply in replies}) == 1
    single = send(two, {"pixels": PIXELS[1], "kind": np.array(KIND[1])})
    assert close(arrays_of(single), {key: array[1:2] for key, array in wanted.items()})


X = {"pixels": PIXELS[0], "kind": 1}
BAD: dict[str, tuple[Json | dict[str, Array], str]] = {  # an entry in JSON, or arrays of a safetensors body
    "unknown": (tensors(pixel=PIXELS[0], kind=1), "did you mean 'pixels'"),
    "missing": (tensors(pixels=PIXELS[0]), "'kind'"),
    "dtype": (tensors(**X | {"kind": 1.0}), "takes int64"),
    "values": (tensors(**X | {"kind": 7}), "7, which is not among its values"),
    "not finite": (tensors(**X | {"pixels": np.full(4, np.inf, np.float32)}), "infinite"),
    "very many": (tensors(**{f"x{place}": PIXELS for place in range(65)}), "at most 64"),
    "strange": (tensors(**{"\r\nX-Evil: 1\0/../": 1}), "kind, pixels"),
    "missing array": ({"pixels": PIXELS}, "'kind'"),
    "other rows": ({"pixels": PIXELS, "kind": KIND[:2]}, "different numbers of rows"),
    "values of an array": ({"pixels": PIXELS, "kind": KIND + 9}, "not among its values"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(two: Live, name: str) -> None:
    """What is wrong with a tensor by name is told with what to send instead."""
    sent, says = BAD[name]
    reply = post(two, sent) if "tensors" in sent else send(two, sent)
    assert says in str(problem(reply, 422)["errors"])
