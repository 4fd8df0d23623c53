"""Interventions and gradients over HTTP: each request against its own offline reference, alone and among others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.support import Json, configured, metadata, net, problem, tensor

changing = server_of(net("touchy", "Touchy"), cpu_threads=2, replicas=2, max_batch_rows=8)


def test_receipts_and_fingerprints(changing: Live) -> None:
    """A changed value is not taken for the model's own, and a gradient tells what it is of."""
    x = random_images(1, 6)
    how = [{"layer": "block1", "op": "scale", "by": 2.0}]
    graded: Json = {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 1}}
    bodies: list[Json] = [
        {"layers": ["block2"]},
        {"layers": ["block2"], "interventions": how},
        {"layers": ["block2"], "interventions": [{**how[0], "by": 3.0}]},
        graded,
        graded | {"objective": {"kind": "logit", "class": 2}},
        graded | {"interventions": how},
    ]
    inputs = [tensor(row) for row in x]
    replies = [changing.client.post("/extract", json={**body, "inputs": inputs}).json() for body in bodies]
    assert len({reply["fingerprint"] for reply in replies}) == len(bodies)
    receipt = replies[3]["receipts"]["block2:grad_output"]
    assert (receipt["site"], receipt["layer"], receipt["layout"]) == ("grad_output", "block2", "NCHW")
    # What is asked for beside a gradient, but is none, is the model's own.
    both = graded | {"layers": ["block2", "block2:grad_output"], "inputs": inputs}
    receipts = changing.client.post("/extract", json=both).json()["receipts"]
    assert receipts["block2"]["fingerprint"] == replies[0]["receipts"]["block2"]["fingerprint"]
    assert receipts["block2:grad_output"]["fingerprint"] == receipt["fingerprint"]


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
    explained = changing.client.post("/explain", json={"method": "saliency", "inputs": inputs}).json()
    assert explained["receipts"]["saliency"]["classes"] == chosen


RELU = "block2.relu"  # runs twice in a forward
BOTH = [f"{RELU}#0:output", f"{RELU}#1:output"]


@pytest.mark.parametrize(("where", "calls"), [(RELU, BOTH), (f"{RELU}#-1", BOTH[1:])])
def test_calls_of_an_intervention(changing: Live, where: str, calls: list[str]) -> None:
    """The reply says which calls of a module were changed: every one, unless one is named."""
    inputs = [tensor(row) for row in random_images(2, 13)]
    body = {"inputs": inputs, "layers": ["head"], "interventions": [{"layer": where, "op": "scale", "by": 0.5}]}
    told = changing.client.post("/extract", json=body).json()
    assert told["interventions"] == [calls]
    dry = changing.client.post("/extract?dry_run=true", json=body).json()
    assert (dry["interventions"], dry["fingerprint"]) == ([calls], told["fingerprint"])
    kept = metadata(changing.client.post("/extract?format=safetensors", json=body))
    assert json.loads(kept["interventions"]) == [calls]


def test_graph_that_does_not_fit(serve: Serve) -> None:
    """A gradient whose graph has no room is refused with its size, before any forward; outputs still work."""
    with serve(configured(), batch_memory_bytes=400_000) as live:
        inputs = [tensor(random_images(1, 7)[0])]
        graded = {"layers": ["block1:grad_output"], "objective": {"kind": "logit", "class": 1}, "inputs": inputs}
        assert "400000" in problem(live.client.post("/extract", json=graded), 413)["detail"]
        assert live.client.post("/extract", json={"layers": ["block1"], "inputs": inputs}).status_code == 200
