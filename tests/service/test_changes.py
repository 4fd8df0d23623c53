"""Interventions and gradients over HTTP: each request against its own offline reference, alone and among others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.support import Array, Json, arrays_of, configured, metadata, net, npy, problem, raw, tensor

Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def changing(serve: Serve) -> Iterator[Live]:
    """A server with two replicas and small forwards."""
    with serve(configured(net("touchy", "Touchy")), cpu_threads=2, replicas=2, max_batch_rows=8) as live:
        yield live


class After(nn.Module):
    """A module whose output is changed by a function."""

    def __init__(self, inner: nn.Module, change: Change) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


def edited(module: Any, name: str, change: Change) -> Any:
    """A copy in which what one part returns is changed."""
    made = copy.deepcopy(module)
    setattr(made, name, After(getattr(made, name), change))
    return made


def gradient(module: Any, x: Tensor, at: str, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient at what a part returns, by autograd on the chain cut in two."""
    names = [name for name, _ in module.named_children()]
    start = forward(module, x, at).detach().clone().requires_grad_()
    out = start.clone()
    for name in names[names.index(at) + 1 :]:
        out = getattr(module, name)(out)
    return torch.autograd.grad(score(out).sum(), start)[0]


def request(batch: Array, layers: list[Any], **more: Any) -> Json:
    """A JSON request for tensors; raw results in base64."""
    return {
        "json": {"inputs": [tensor(row) for row in batch], "layers": layers, "encoding": "base64", **more},
        "params": {"format": "npz"},
    }


def noisy(live: Live, seed: int) -> tuple[Json, dict[str, Tensor]]:
    """Noise by seed; the request is larger than a forward."""
    x = random_images(11, seed)

    def change(value: Tensor) -> Tensor:
        drawn = [torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(seed + n)) for n in range(11)]
        return value + 0.3 * torch.stack(drawn)

    module = edited(copy_digits(live), "block2", change)
    with torch.no_grad():
        wanted = {name: forward(module, torch.from_numpy(x), name) for name in ("block2", "head")}
    how = [{"layer": "block2", "op": "noise", "std": 0.3, "seed": seed}]
    return request(x, list(wanted), interventions=how), wanted


def logit(live: Live, seed: int) -> tuple[Json, dict[str, Tensor]]:
    """The gradient of a class score at a layer."""
    module, x = copy_digits(live), random_images(1 + seed % 3, seed)
    at = ("block1", "block2", "block3")[seed % 3]
    wanted = {f"{at}:grad_output": gradient(module, torch.from_numpy(x), at, lambda out: out[:, seed % 10])}
    return request(x, list(wanted), objective={"kind": "logit", "class": seed % 10}), wanted


def entropy(live: Live, seed: int) -> tuple[Json, dict[str, Tensor]]:
    """The gradient at the picture, of a request larger than a forward."""
    module, x = copy_digits(live), random_images(9, seed)
    start = torch.from_numpy(x).requires_grad_()
    loss = nn.functional.cross_entropy(forward(module, start), torch.full((9,), seed % 10), reduction="sum")
    wanted = {".:grad_input": torch.autograd.grad(loss, start)[0]}
    return request(x, list(wanted), objective={"kind": "cross_entropy", "class": seed % 10}), wanted


KINDS = (noisy, logit, entropy)


def check(reply: Any, wanted: dict[str, Tensor]) -> None:
    """A reply has just what is wanted."""
    found = arrays_of(reply)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        largest = float(value.abs().max())
        assert largest > 0
        np.testing.assert_allclose(found[key], value.numpy(), rtol=1e-3, atol=2e-5 * largest, err_msg=key)


def test_all_at_once(changing: Live) -> None:
    """Changed and differentiated requests run beside each other; each gets what it gets alone."""
    made = [kind(changing, seed) for seed in range(8) for kind in KINDS]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda pair: changing.client.post("/extract", **pair[0]), made))
    for reply, (_, wanted) in zip(replies, made, strict=True):
        check(reply, wanted)
    model = changing.engine.manager.registry.get_entry("digits").model
    assert model is not None
    for replica in model.replicas:
        assert replica.hooks == 0
        assert all(value.grad is None and not value.requires_grad for value in replica.module.parameters())
        assert not any(part.training for part in replica.module.modules())


def test_receipts_and_fingerprints(changing: Live) -> None:
    """A changed value is not taken for the model's own, and a gradient tells what it is of."""
    x = random_images(1, 6)
    how = [{"layer": "block1", "op": "scale", "by": 2.0}]
    bodies: list[Json] = [
        {"layers": ["block2"]},
        {"layers": ["block2"], "interventions": how},
        {"layers": ["block2"], "interventions": [{**how[0], "by": 3.0}]},
        {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 1}},
        {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 2}},
        {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 2}, "interventions": how},
    ]
    inputs = [tensor(row) for row in x]
    replies = [changing.client.post("/extract", json={**body, "inputs": inputs}).json() for body in bodies]
    assert len({reply["fingerprint"] for reply in replies}) == len(bodies)
    receipt = replies[3]["receipts"]["block2:grad_output"]
    assert (receipt["site"], receipt["layer"], receipt["layout"]) == ("grad_output", "block2", "NCHW")
    # What is asked for beside a gradient, but is none, is the model's own.
    both = {"layers": ["block2", "block2:grad_output"], "objective": {"kind": "logit", "class": 1}, "inputs": inputs}
    receipts = changing.client.post("/extract", json=both).json()["receipts"]
    assert receipts["block2"]["fingerprint"] == replies[0]["receipts"]["block2"]["fingerprint"]
    assert receipts["block2:grad_output"]["fingerprint"] == receipt["fingerprint"]


@pytest.mark.parametrize(
    ("left_out", "whole"),
    [({}, {"kind": "logit", "class": "top"}), ({"kind": "kl_div"}, {"kind": "kl_div", "class": "top"})],
)
def test_objective_defaults(changing: Live, left_out: Json, whole: Json) -> None:
    """What an objective leaves out is the logit, and the row's own highest score; on both routes."""
    body: Json = {"inputs": [tensor(row) for row in random_images(2, 9)]}
    for path, more in (("/extract", {"layers": ["block2:grad_output"]}), ("/explain", {"method": "saliency"})):
        replies = [
            changing.client.post(path, json={**body, **more, "objective": objective}).json()
            for objective in (left_out, whole)
        ]
        assert replies[0]["features"] == replies[1]["features"]
        assert replies[0]["fingerprint"] == replies[1]["fingerprint"]


def test_highest_score_by_default(changing: Live) -> None:
    """The defaults mean what an offline gradient of each row's highest score means, in a query too."""
    x = random_images(3, 10)
    wanted = gradient(copy_digits(changing), torch.from_numpy(x), "block3", lambda out: out.amax(1))
    reply = changing.client.post("/extract", **request(x, ["block3:grad_output"], objective={}))
    check(reply, {"block3:grad_output": wanted})
    query = {"layers": "block3:grad_output", "class": "3", "format": "npy"}
    reply = changing.client.post("/extract", **raw(npy(x), "application/x-npy", **query))
    wanted = gradient(copy_digits(changing), torch.from_numpy(x), "block3", lambda out: out[:, 3])
    np.testing.assert_allclose(arrays_of(reply)[""], wanted.numpy(), rtol=1e-3, atol=1e-6)


def test_difference_of_logits(changing: Live) -> None:
    """A weighted sum of scores; one with the same class twice has the sum of its weights."""
    x = random_images(2, 11)
    wanted = gradient(copy_digits(changing), torch.from_numpy(x), "block3", lambda out: out[:, 3] - 0.5 * out[:, 7])
    objective = {"terms": [[1, 3], [-0.25, 7], [-0.25, 7]]}
    check(
        changing.client.post("/extract", **request(x, ["block3:grad_output"], objective=objective)),
        {"block3:grad_output": wanted},
    )


def test_classes_in_receipts(changing: Live) -> None:
    """The class that "top" chose for each row is in the receipt of what depends on it, on both routes."""
    x = random_images(11, 12)
    with torch.no_grad():
        chosen = forward(copy_digits(changing), torch.from_numpy(x)).argmax(1).tolist()
    assert len(set(chosen)) > 1
    inputs = [tensor(row) for row in x]
    body = {"inputs": inputs, "layers": ["block3:grad_output", "head"], "objective": {}, "encoding": "base64"}
    with ThreadPoolExecutor(4) as pool:  # beside others, whose rows have classes of their own
        replies = list(pool.map(lambda _: changing.client.post("/extract", json=body), range(4)))
    for reply in replies:
        receipts = reply.json()["receipts"]
        assert receipts["block3:grad_output"]["classes"] == chosen
        assert "classes" not in receipts["head"]
    kept = metadata(changing.client.post("/extract?format=safetensors", json=body))
    assert json.loads(kept["receipts"])["block3:grad_output"]["classes"] == chosen
    told = changing.client.post("/extract", json={**body, "objective": {"class": 3}}).json()
    assert "classes" not in told["receipts"]["block3:grad_output"]
    for method in ("saliency", "grad_cam"):
        for objective in ({}, None):
            explained = changing.client.post(
                "/explain", json={"method": method, "inputs": inputs, "objective": objective}
            ).json()
            assert explained["receipts"][method]["classes"] == chosen


def halved(value: Tensor) -> Tensor:
    """Half of it."""
    return value * 0.5


class Second(nn.Module):
    """A module of whose calls the second is changed."""

    def __init__(self, inner: nn.Module, change: Change) -> None:
        super().__init__()
        self.inner, self.change, self.calls = inner, change, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return self.change(out) if self.calls == 2 else out


RELU = "block2.relu"  # runs twice in a forward
BOTH = [f"{RELU}#0:output", f"{RELU}#1:output"]


@pytest.mark.parametrize(
    ("where", "calls"), [(RELU, BOTH), (f"{RELU}#*", BOTH), (f"{RELU}#1", BOTH[1:]), (f"{RELU}#-1", BOTH[1:])]
)
def test_calls_of_an_intervention(changing: Live, where: str, calls: list[str]) -> None:
    """Every call of a module is changed unless one is named, and the reply says which were."""
    module, x = copy_digits(changing), random_images(2, 13)
    kind = After if calls == BOTH else Second
    module.block2.relu = kind(module.block2.relu, halved)
    with torch.no_grad():
        wanted = forward(module, torch.from_numpy(x))
    body = request(x, ["head"], interventions=[{"layer": where, "op": "scale", "by": 0.5}])
    check(changing.client.post("/extract", **body), {"head": wanted})
    told = changing.client.post("/extract", json=body["json"]).json()
    assert told["interventions"] == [calls]
    dry = changing.client.post("/extract?dry_run=true", json=body["json"]).json()
    assert (dry["interventions"], dry["fingerprint"]) == ([calls], told["fingerprint"])
    kept = metadata(changing.client.post("/extract?format=safetensors", json=body["json"]))
    assert json.loads(kept["interventions"]) == [calls]
    plain_ = changing.client.post("/extract", **{**request(x, ["head"]), "params": {}}).json()
    assert "interventions" not in plain_


def test_graph_that_does_not_fit(serve: Serve) -> None:
    """A gradient whose graph has no room is refused with its size, before any forward; outputs still work."""
    with serve(configured(), batch_memory_bytes=400_000) as live:
        inputs = [tensor(random_images(1, 7)[0])]
        graded = {"layers": ["block1:grad_output"], "objective": {"kind": "logit", "class": 1}, "inputs": inputs}
        assert "400000" in problem(live.client.post("/extract", json=graded), 413)["detail"]
        assert live.client.post("/extract", json={"layers": ["block1"], "inputs": inputs}).status_code == 200
