"""Gradients of weights over HTTP, against autograd for each input alone; keys, refusals, and whoever asks meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from layertap.models.digits import spec as digits
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, random_images
from tests.service.support import Array, Json, arrays_of, problem, tensor

CONV = "block2.conv1"
LABELS = (3, 5, 7, 1)
ROWS = random_images(len(LABELS), seed=17)
LABELLED = [{**tensor(row), "class": label} for row, label in zip(ROWS, LABELS, strict=True)]
LOSS = {"kind": "cross_entropy"}


def post(live: Live, layers: list[Any], inputs: list[Json] = LABELLED, path: str = "/extract", **fields: Any) -> Any:
    body = {"layers": layers, "inputs": inputs, "encoding": "base64", "objective": LOSS, **fields}
    return live.client.post(path, json=body)


@pytest.fixture(scope="module")
def expected(live: Live) -> dict[str, Array]:
    """Each parameter's gradients, a row for each input."""
    module = copy_digits(live).requires_grad_()
    rows: list[dict[str, Array]] = []
    for row, label in zip(torch.from_numpy(ROWS), LABELS, strict=True):
        loss = functional.cross_entropy(module(row[None]), torch.tensor([label]))
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        names = (name for name, _ in module.named_parameters())
        rows.append({name: each.numpy() for name, each in zip(names, gradients, strict=True)})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def close(found: Array, wanted: Array) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_every_form(live: Live, expected: dict[str, Array]) -> None:
    """Each input's own, its norm and its products with vectors; all inputs' sum, mean, Fisher diagonal and products."""
    flat = expected[f"{CONV}.weight"].reshape(len(ROWS), -1)
    vectors = np.random.default_rng(1).normal(size=(2, flat.shape[1])).astype(np.float32)
    wanted = {
        "raw[weight]": expected["head.weight"],
        "raw[bias]": expected["head.bias"],
        "norm": np.linalg.norm(flat, axis=1)[:, None],
        "unit": flat / np.linalg.norm(flat, axis=1)[:, None],
        "vectors": flat @ vectors.T,
        "sum": expected["head.bias"].sum(0),
        "mean": expected["head.weight"].mean(0),
        "fisher": np.square(expected[f"{CONV}.weight"]).mean(0),
        "dot": flat @ flat.T,
        "vectors_dot": (flat @ vectors.T) @ (flat @ vectors.T).T,
    }
    weight, project = f"{CONV}:grad_weight", {"weight": tensor(vectors)["tensor"]}
    layers = [
        {"layer": "head:grad_weight", "as": "raw"},
        {"layer": weight, "stats": ["l2"], "as": "norm"},
        {"layer": weight, "pool": "flatten", "normalize": True, "as": "unit"},
        {"layer": weight, "project": project, "as": "vectors"},
        {"layer": "head[bias]:grad_weight", "combine": "sum", "as": "sum"},
        {"layer": "head", "path": "[weight]", "site": "grad_weight", "combine": "mean", "as": "mean"},
        {"layer": weight, "combine": "mean_square", "as": "fisher"},
        {"layer": weight, "combine": "dot", "as": "dot"},
        {"layer": weight, "project": project, "combine": "dot", "as": "vectors_dot"},
    ]
    reply = post(live, layers)
    found, receipts = arrays_of(reply), reply.json()["receipts"]
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        close(found[key], value)
        assert receipts[key]["site"] == "grad_weight"
        assert receipts[key]["rows_per_forward"] == 1
        assert ("row_axis" in receipts[key]) == ("combine" in receipts[key])
    assert len({receipt["fingerprint"] for receipt in receipts.values()}) == len(receipts)
    dry = post(live, layers, path="/extract?dry_run=true").json()["features"]
    assert {key: tuple(each["shape"]) for key, each in dry.items()} == {key: each.shape for key, each in found.items()}
    # With one label for all, the inputs are one job.
    several, one = (
        arrays_of(post(live, layers, [each | own for each in map(tensor, ROWS)], objective=LOSS | objective))
        for own, objective in (({"class": 3}, {}), ({}, {"class": 3}))
    )
    for key in wanted:
        np.testing.assert_array_equal(several[key], one[key])


def test_glob(live: Live, expected: dict[str, Array]) -> None:
    """All parameters up to the objective's layer, under canonical names."""
    found = arrays_of(post(live, ["*:grad_weight"]))
    names = {key.replace("[", ".").replace("]:grad_weight", ""): key for key in found}
    assert names.keys() == expected.keys()
    for name, key in names.items():
        close(found[key], expected[name])
    before = arrays_of(post(live, ["*:grad_weight"], [tensor(ROWS[0])], objective={"kind": "mean", "layer": "block1"}))
    assert {key.partition(".")[0] for key in before} == {"block1"}


def test_others_meanwhile(live: Live) -> None:
    """What others ask meanwhile is the same, bit for bit, and the model's parameters stay frozen."""
    rows = [[tensor(row)] for row in ROWS]
    asked: list[Any] = [
        *[(["head", "block2"], row, None) for row in rows],
        *[(["block2:grad_output"], row, LOSS) for row in rows],
        *[([f"{CONV}:grad_weight", "*:grad_weight"], row, LOSS) for row in rows],
    ]

    def ask(each: Any) -> Any:
        return post(live, each[0], each[1], objective=each[2], isolated=True).json()["features"]

    alone = [ask(each) for each in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, asked * 3)) == alone * 3
    assert not any(parameter.requires_grad for parameter in copy_digits(live).parameters())


def test_a_mean_over_inputs(live: Live, expected: dict[str, Array]) -> None:
    """An objective over inputs is divided by their number, whether these are one job or several, pictures or arrays."""
    found = arrays_of(post(live, ["head:grad_weight"], objective=LOSS | {"over": "inputs"}))
    close(found["head[weight]:grad_weight"], expected["head.weight"] / len(ROWS))
    module, x = copy_digits(live), torch.from_numpy(ROWS).requires_grad_()
    functional.cross_entropy(module(x), torch.full((len(ROWS),), 3)).backward()
    objective = LOSS | {"over": "inputs", "class": 3}
    one = post(live, [".:grad_input"], [*map(tensor, ROWS)], objective=objective)
    assert x.grad is not None
    close(arrays_of(one)[".:grad_input"], x.grad.numpy())
    fewer = post(live, [".:grad_input"], [tensor(ROWS[0])], objective=objective)
    assert fewer.json()["fingerprint"] != one.json()["fingerprint"]
    sweep = {"op": "zero", "objective": objective}
    assert "mean over inputs" in problem(post(live, ["block1"], path="/sweep", **sweep), 422)["detail"]


def test_keys_of_sites(live: Live) -> None:
    """A site by field is part of the key, as in a selector."""
    layers = [{"layer": "block2", "site": "grad_output"}, "block2", {"layer": "block2:input", "site": "input"}]
    reply = post(live, layers, inputs=[tensor(ROWS[0])])
    assert list(arrays_of(reply)) == ["block2:grad_output", "block2", "block2:input"]


@pytest.mark.parametrize(
    ("layers", "fields", "said"),
    [
        (["head#0:grad_weight"], {}, "of all of its calls together"),
        (["head[gain]:grad_weight"], {}, "paths here: [weight], [bias]"),
        (["block2.relu:grad_weight"], {}, "itself has no floating parameter"),
        (["block2/add#0:grad_weight"], {}, "one of layers"),
        (
            ["head:grad_weight"],
            {"objective": {"kind": "layer", "layer": "block1"}, "inputs": [tensor(ROWS[0])]},
            "later",
        ),
        (["head:grad_weight"], {"objective": None, "inputs": [tensor(ROWS[0])]}, "needs an objective"),
        ([{"layer": "head", "combine": "sum"}], {}, "is of gradients of weights"),
        ([{"layer": "head:grad_weight", "combine": "sum", "stats": ["l2"]}], {}, "contradicts 'stats'"),
        ([{"layer": "head:grad_weight", "combine": "sum", "dtype": "float16"}], {}, "computed in float32"),
        (["head"], {"interventions": [{"layer": "head:grad_weight", "op": "zero"}]}, "is not possible"),
        ([".:grad_weight"], {"model": "never_called", "inputs": [tensor(ROWS[0, 0, 0, :4])]}, "[silent.bias]"),
        (
            ["*:grad_weight"],
            {"model": "centred", "isolated": True, "inputs": [tensor(ROWS[0, 0, 0, :4])] * 2},
            "one input",
        ),
    ],
)
def test_refusals(live: Live, layers: list[Any], fields: Json, said: str) -> None:
    """What has no such gradient, in the words of the request."""
    objective = {"objective": {"kind": "mean"}} if "model" in fields else {}
    found = problem(post(live, layers, **(objective | fields)), 422)
    assert said in f"{found['detail']} / {[each.get('hint') for each in found['errors']]}"


def test_limits(live: Live, serve: Serve) -> None:
    """Gradients of weights count in a reply and in the memory of a forward; names are of the model's own classes."""
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    enough = model.catalog.graph_costs.row_bytes + 2**16
    named = replace(digits(), labels=tuple("abcdefghij"))
    limits = {"batch_memory_bytes": enough, "max_reply_bytes": 2**16}
    with serve(Configuration((named,), "digits"), **limits) as limited:
        assert "the limit is 65536" in problem(post(limited, [f"{CONV}:grad_weight"]), 413)["detail"]
        assert post(limited, [{"layer": f"{CONV}:grad_weight", "stats": ["l2"]}]).status_code == 200
        norm = {"layer": "block3.conv2:grad_weight", "stats": ["l2"]}
        assert "keeps its graph" in problem(post(limited, [norm]), 413)["detail"]
        receipts = [
            post(limited, ["head:grad_output"], [tensor(ROWS[0])], objective=LOSS | layer).json()["receipts"]
            for layer in ({}, {"layer": "head"})
        ]
    of_model, of_layer = (each["head:grad_output"] for each in receipts)
    assert of_model["labels"] == ["abcdefghij"[of_layer["classes"][0]]]
    assert "labels" not in of_layer
