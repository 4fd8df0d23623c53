"""Comparisons of layers of two models, against the formulas of the papers on what plain hooks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.explain import comparing
from tests.oracle import measure_hsic
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, configured, copy_module, problem, tensor
from tests.transformers_nets import saved

IMAGES = np.random.default_rng(4).normal(size=(12, 3, 32, 32)).astype(np.float32)
SMALL = (InputSpec("x", (3, 32, 32)),)
TEXTS = [[4 + (7 * row + place) % 16 for place in range(3 + row % 4)] for row in range(6)]
MEASURES = ["cka", "rsa", "procrustes", "gram"]
RESNET = {"model": "resnet18", "layers": ["layer1", "layer3"]}
VIT = {"model": "vit", "layers": ["blocks.0", "blocks.1", "norm"]}
Values = list[Array]  # of layers, (inputs, numbers)


@dataclass(frozen=True)
class Nets:
    live: Live
    resnet18: Any
    vit: Any
    gpt2: Any

    def compare(self, **body: Any) -> Json:
        body = {"inputs": [tensor(row) for row in IMAGES], **body}
        reply = self.live.client.post("/compare", json=body)
        assert reply.status_code == 200, reply.text
        found: Json = reply.json()
        return found


@pytest.fixture(scope="module")
def nets(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nets]:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    gpt2 = saved("gpt2", folder)
    specs = (
        ModelSpec("resnet18", "torchvision:resnet18", weights="random:0", device="cpu", inputs=SMALL),
        ModelSpec("vit", "timm:vit_tiny_patch16_224", "random:1", device="cpu", args={"img_size": 32, "depth": 2}),
        ModelSpec("gpt2", f"transformers:{folder}", device="cpu"),
    )
    # Inputs need several forwards.
    with serve(configured(*specs), max_batch_rows=5) as live, torch.no_grad():
        for spec in specs:
            live.client.post(f"/models/{spec.name}/load")
        yield Nets(live, copy_module(live, "resnet18"), copy_module(live, "vit"), gpt2)


def hook(module: nn.Module, layers: list[str], x: Tensor, pool: Callable[[Tensor], Tensor]) -> Values:
    """What layers return, pooled, in double precision."""
    seen: dict[str, Array] = {}

    def keep(name: str) -> Any:
        return lambda part, args, output: seen.update({name: pool(output).flatten(1).double().numpy()})

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    module.eval()(x)
    for handle in handles:
        handle.remove()
    return [seen[name] for name in layers]


def cka(one: Array, other: Array) -> float:
    """Kornblith et al. 2019, by features as in their equation of linear CKA."""
    a, b = one - one.mean(0), other - other.mean(0)
    return float(np.linalg.norm(b.T @ a) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)))


def rsa(one: Array, other: Array) -> float:
    """Kriegeskorte et al. 2008, by scipy."""
    return float(spearmanr(pdist(one, "correlation"), pdist(other, "correlation")).statistic)


def procrustes(one: Array, other: Array) -> float:
    """Ding et al. 2021: the squared distance after the best rotation, found by SVD, of representations of norm 1."""
    size = max(one.shape[1], other.shape[1])
    a, b = (np.pad(each - each.mean(0), ((0, 0), (0, size - each.shape[1]))) for each in (one, other))
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    left, _, right = np.linalg.svd(a.T @ b)
    return float(np.linalg.norm(a @ (left @ right) - b) ** 2)


def check(found: Json, first: Values, second: Values) -> None:
    """The tables of a reply are those of the formulas."""
    for name, formula in {"cka": cka, "rsa": rsa, "procrustes": procrustes}.items():
        wanted = [[formula(one, other) for other in second] for one in first]
        np.testing.assert_allclose(found["measures"][name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    grams = [each @ each.T for each in (first if second is first else [*first, *second])]
    np.testing.assert_allclose(found["measures"]["gram"], grams, rtol=1e-4, atol=1e-4)


def test_two_models(nets: Nets) -> None:
    """Pooled layers of one model to flattened ones of another, fewer inputs than numbers and more."""
    x = torch.from_numpy(IMAGES)
    two = [{"layer": name, "tokens": [0, -1]} for name in VIT["layers"]]
    found = nets.compare(**RESNET, pool="mean", measures=MEASURES, **{"with": VIT | {"layers": two}})
    first = hook(nets.resnet18, RESNET["layers"], x, lambda value: value.mean((2, 3)))
    check(found, first, hook(nets.vit, VIT["layers"], x, lambda value: value[:, [0, -1]]))
    assert (found["model"], found["other_model"], found["rows"]) == ("resnet18", "vit", 12)
    assert (found["layers"], found["other_layers"]) == (RESNET["layers"], VIT["layers"])
    narrow = {"layer": "layer1", "channels": [0, 1, 2], "pool": "mean"}  # three numbers for twelve inputs
    found = nets.compare(**{**RESNET, "layers": [narrow]}, measures=MEASURES, **{"with": VIT | {"pool": "cls"}})
    check(found, [first[0][:, :3]], hook(nets.vit, VIT["layers"], x, lambda value: value[:, 0]))


@pytest.mark.parametrize("count", [4, 12])
def test_unbiased(nets: Nets, count: int) -> None:
    """HSIC of all layers, of both models in one table; of one model they are there once."""
    sent: Json = {"inputs": [tensor(row) for row in IMAGES[:count]], "pool": "mean", "measures": "hsic"}
    x = torch.from_numpy(IMAGES[:count])
    first = hook(nets.resnet18, RESNET["layers"], x, lambda value: value.mean((2, 3)))
    layers = [*first, *hook(nets.vit, VIT["layers"], x, lambda value: value[:, 0])]
    both = nets.compare(**RESNET, **sent, **{"with": VIT | {"pool": "cls"}})
    for table, of_all in ((both, layers), (nets.compare(**RESNET, **sent), first)):
        wanted = np.array([[measure_hsic(one, other) for other in of_all] for one in of_all])
        scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal()))
        np.testing.assert_allclose(table["measures"]["hsic"] / scale, wanted / scale, rtol=1e-5, atol=1e-5)


def test_headers(nets: Nets) -> None:
    """Fingerprints of both sides are those of their features; the whole has its own, and warnings are headers too."""
    sent = [tensor(row) for row in IMAGES]
    large = [{"layer": "layer1", "op": "scale", "by": 1e38}, {"layer": "layer1", "op": "scale", "by": 1e38}]
    body: Json = {**RESNET, "pool": "mean", "inputs": sent, "interventions": large}
    reply = nets.live.client.post("/compare", json={**body, "with": VIT})
    sides = [nets.live.client.post("/extract", json=each) for each in (body, {**VIT, "inputs": sent})]
    found = reply.json()
    assert found["fingerprints"] == [side.headers["x-layertap-fingerprint"] for side in sides]
    assert reply.headers["x-layertap-fingerprint"] == found["fingerprint"]
    assert found["fingerprint"] not in found["fingerprints"]
    assert reply.headers["x-layertap-warnings"] == sides[0].headers["x-layertap-warnings"]
    alone = nets.live.client.post("/compare", json={**VIT, "inputs": sent})
    assert alone.json()["fingerprints"] == [found["fingerprints"][1]] * 2
    assert "x-layertap-warnings" not in alone.headers


def test_one_model(nets: Nets) -> None:
    """Without another model layers are compared to each other."""
    found = nets.compare(**VIT, pool="cls", measures=MEASURES)
    own = hook(nets.vit, VIT["layers"], torch.from_numpy(IMAGES), lambda value: value[:, 0])
    check(found, own, own)
    assert np.allclose(np.diag(found["measures"]["cka"]), 1)
    assert found["layers"] == found["other_layers"] == VIT["layers"]
    rounded = nets.compare(**VIT, pool="cls", dtype="int8")["measures"]["cka"]
    assert rounded != found["measures"]["cka"]
    np.testing.assert_allclose(rounded, found["measures"]["cka"], atol=0.01)


def test_texts_and_a_changed_model(nets: Nets) -> None:
    """Texts of several lengths, and a model compared to itself with a layer changed."""
    inputs = [{"tokens": each} for each in TEXTS]
    names = [f"transformer.h.{number}" for number in range(2)]
    changes = [{"layer": names[0], "op": "scale", "by": -3}]
    body: Json = {"model": "gpt2", "layers": names, "pool": "last", "inputs": inputs, "interventions": changes}
    found = nets.compare(**body, measures=MEASURES, **{"with": {"model": "gpt2", "layers": names, "pool": "last"}})

    def run(factor: float) -> Values:
        seen: dict[str, list[Array]] = {name: [] for name in names}

        def keep(name: str) -> Any:
            def change(part: Any, args: Any, output: Any) -> Any:
                value, *rest = output if isinstance(output, tuple) else (output,)
                value = value * factor if name == names[0] else value
                seen[name].append(value[0, -1].double().numpy())
                return (value, *rest) if isinstance(output, tuple) else value

            return change

        handles = [nets.gpt2.get_submodule(name).register_forward_hook(keep(name)) for name in names]
        for tokens in TEXTS:
            nets.gpt2(torch.tensor([tokens]))
        for handle in handles:
            handle.remove()
        return [np.array(seen[name]) for name in names]

    check(found, run(-3), run(1))
    assert found["measures"]["cka"][0][0] == pytest.approx(1)  # a scale changes no similarity
    assert found["measures"]["cka"][1][1] < 0.999


def test_numbers_that_are_none(nets: Nets) -> None:
    """A layer that is the same for all inputs is like no other: null."""
    zero = {"layer": "layer1", "op": "zero"}
    found = nets.compare(**RESNET, pool="mean", measures=MEASURES[:3], interventions=[zero], **{"with": VIT})
    for name in MEASURES[:3]:
        assert found["measures"][name][0] == [None] * 3


SEVERAL: list[Json] = [{"tokens": each} for each in TEXTS]
REFUSED: list[tuple[Json, int, str]] = [
    ({"inputs": [tensor(IMAGES[0])]}, 422, "cka needs 2 inputs at least"),
    ({"inputs": [tensor(row) for row in IMAGES[:3]], "measures": "hsic"}, 422, "hsic needs 4 inputs at least"),
    ({"measures": ["cca"]}, 422, "Input should be 'cka', 'rsa', 'procrustes', 'gram', 'hsic' or a list of some"),
    ({"with": {"model": "vit", "layers": ["nowhere"]}}, 422, "there is no layer 'nowhere'"),
    ({"with": {"model": "vit", "layers": ["norm", "nowhere"]}}, 422, "'pointer': '/with/layers/1'"),
    ({"with": {"model": "nobody", "layers": ["norm"]}}, 404, "there is no model 'nobody'"),
    ({"on_error": "skip"}, 422, "Input should be 'fail'"),
    (
        {"pool": "none", "model": "gpt2", "inputs": SEVERAL, "layers": ["transformer.h.0:input"]},
        422,
        "no row of one size",
    ),
    ({"layers": [{"layer": "layer1", "stats": ["mean"], "over": "inputs"}]}, 422, "no row of one size for each input"),
]


def test_refused(nets: Nets, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be compared, in words; work and replies have bounds."""
    body: Json = {**RESNET, "inputs": [tensor(row) for row in IMAGES], "pool": "mean"}
    for fields, status, said in REFUSED:
        reply = nets.live.client.post("/compare", json={**body, **fields})
        found = problem(reply, status)
        assert said in str(found), found
    monkeypatch.setattr(comparing, "MAX_WORK", 4 * (12**3 + 2**16) - 1)
    reply = nets.live.client.post("/compare", json={**body, "measures": "procrustes"})
    assert "4 pairs of layers by 12 inputs is too large" in problem(reply, 413)["detail"]
    assert nets.live.client.post("/compare?format=npz", json=body).status_code == 406
