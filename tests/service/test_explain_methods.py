"""More methods of ``POST /explain``, against captum and torch on equal weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from captum.attr import GuidedBackprop, IntegratedGradients, Occlusion, Saliency
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.gated_server import wait_until
from tests.service.support import Array, Json, arrays_of, configured, metadata, problem, tensor

PICTURE = InputSpec("x", (3, 32, 32))
MODELS = {
    "cnn": "python:tests.service.nets_http:Cnn",
    "resnet": "torchvision:resnet18",
    "vit": "python:tests.nets:vit",
    "functional": "python:tests.service.nets_http:FunctionalRelu",
    "partly": "python:tests.service.nets_http:PartlyGuided",
}


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Live]:
    """A server of small networks with seeded weights."""
    specs = [
        ModelSpec(name, source, weights="random:5", inputs=(PICTURE,), preprocess="none", labels=LABELS.get(name))
        for name, source in MODELS.items()
    ]
    with serve(configured(*specs)) as live:
        yield live


LABELS = {"cnn": ("ant", "bee", "cat", "dog", "eel")}


def module_of(live: Live, name: str) -> nn.Module:
    """A copy of a served model that no hook ever touches, whose ReLUs write to memory of their own."""
    model: Any = live.engine.manager.registry.get_entry(name).model
    module: nn.Module = copy.deepcopy(model.module).eval()
    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return module


def ask(live: Live, x: Array, **body: Any) -> Any:
    """The reply to a JSON request for tensors."""
    return live.client.post(
        "/explain", json={"inputs": [tensor(row) for row in x], "encoding": "base64", **body}, timeout=120
    )


def explained(live: Live, x: Array, method: str, **body: Any) -> Array:
    """The attributions of a method."""
    return arrays_of(ask(live, x, method=method, **body))[method]


def assert_close(found: Array, wanted: Any) -> None:
    """Within what float32 in another order may differ by."""
    expected = wanted.detach().numpy() if isinstance(wanted, Tensor) else wanted
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")  # captum says so each time
@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_guided_backpropagation(served: Live, name: str) -> None:
    """Of captum, signed, in the model's own pixels; each row of a batch for its own highest class or for one."""
    x = random_images(3, 1)
    module = module_of(served, name)
    top = module(torch.from_numpy(x)).argmax(1)
    wanted = GuidedBackprop(module).attribute(torch.from_numpy(x).requires_grad_(), target=top)
    found = explained(served, x, "guided_backpropagation", model=name)
    assert_close(found, wanted)
    assert found.min() < 0 < found.max()
    wanted = GuidedBackprop(module).attribute(torch.from_numpy(x).requires_grad_(), target=2)
    assert_close(explained(served, x, "guided_backpropagation", model=name, objective={"class": 2}), wanted)
    plain = Saliency(module_of(served, name)).attribute(torch.from_numpy(x).requires_grad_(), target=2, abs=False)
    assert not np.allclose(plain.detach().numpy(), wanted.detach().numpy(), rtol=0.1)


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")
def test_unguided_functions_are_named(served: Live) -> None:
    """Captum guides a ReLU that is a part and no other; here the reply says whose forward has others."""
    x = random_images(2, 4)
    reply = ask(served, x, method="guided_backpropagation", model="partly", objective={"class": 1})
    wanted = GuidedBackprop(module_of(served, "partly")).attribute(torch.from_numpy(x).requires_grad_(), target=1)
    assert_close(arrays_of(reply)["guided_backpropagation"], wanted)
    assert reply.json()["warnings"] == ["ReLUs that are functions were not guided, in the forward of: '.', 'block'"]
    assert "warnings" not in ask(served, x, method="guided_backpropagation", model="resnet").json()


@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_integrated_gradients(served: Live, name: str) -> None:
    """Of captum; with enough steps they sum up to the score above that of an input of zeros."""
    x = random_images(2, 2)
    module, images = module_of(served, name), torch.from_numpy(random_images(2, 2))
    reply = ask(served, x, method="integrated_gradients", model=name, steps=40, objective={"class": 1})
    found = arrays_of(reply)["integrated_gradients"]
    assert_close(found, IntegratedGradients(module).attribute(images, target=1, n_steps=40).float())
    receipt = reply.json()["receipts"]["integrated_gradients"]
    assert (receipt["layer"], receipt["site"], receipt["layout"]) == (".", "grad_input", "NCHW")
    more = explained(served, x, "integrated_gradients", model=name, steps=150, objective={"class": 1})
    rise = (module(images) - module(torch.zeros_like(images)))[:, 1].detach().numpy()
    np.testing.assert_allclose(more.sum((1, 2, 3)), rise, rtol=0.02, atol=0.02 * np.abs(rise).max())


@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_smoothgrad(served: Live, name: str) -> None:
    """The mean of captum's gradients over copies with the documented noise; of another seed another."""
    x = random_images(2, 3)
    module = module_of(served, name)
    top = module(torch.from_numpy(x)).argmax(1)
    total = torch.zeros_like(torch.from_numpy(x))
    for number in range(12):
        noise = np.random.default_rng([7, number]).standard_normal((3, 32, 32))
        noisy = np.stack([row + 0.2 * (row.max() - row.min()) * noise for row in x]).astype(np.float32)
        total += Saliency(module).attribute(torch.from_numpy(noisy).requires_grad_(), target=top, abs=False)
    body: Json = {"model": name, "samples": 12, "noise": 0.2, "seed": 7}
    found = explained(served, x, "smoothgrad", **body)
    assert_close(found, total / 12)
    alone = explained(served, x[1:], "smoothgrad", **body)
    assert_close(found[1:], alone)
    assert np.array_equal(explained(served, x[1:], "smoothgrad", **body), alone)
    assert not np.allclose(explained(served, x, "smoothgrad", **body | {"seed": 8}), found, rtol=0.01)
    plain = Saliency(module).attribute(torch.from_numpy(x).requires_grad_(), target=top, abs=False)
    assert_close(explained(served, x, "smoothgrad", model=name, noise=0, samples=2), plain)


@pytest.mark.parametrize(("name", "window", "stride"), [("vit", 8, 4), ("cnn", 5, 3), ("cnn", 32, 1)])
def test_occlusion(served: Live, name: str, window: int, stride: int) -> None:
    """Of captum: the drop of the score, mean over the windows that cover a pixel, cut at the edge."""
    x = random_images(2, 4)
    module = module_of(served, name)
    top = module(torch.from_numpy(x)).argmax(1)
    wanted = Occlusion(module).attribute(
        torch.from_numpy(x), (3, window, window), (3, stride, stride), baselines=0, target=top
    )
    found = explained(served, x, "occlusion", model=name, window=window, stride=stride)
    assert_close(found, wanted[:, 0])


@pytest.mark.parametrize(
    ("objective", "score"),
    [
        ({"kind": "probability", "class": 3}, lambda out: out.softmax(1)[:, 3]),
        ({"terms": [[1, 3], [-2, 0]]}, lambda out: out[:, 3] - 2 * out[:, 0]),
    ],
    ids=("probability", "logits"),
)
@pytest.mark.parametrize("method", ["occlusion", "integrated_gradients"])
def test_other_objectives(served: Live, method: str, objective: Json, score: Callable[[Tensor], Tensor]) -> None:
    """What is explained is what the objective says; without a class of each row there is none in the receipt."""
    x = random_images(2, 4)
    module = module_of(served, "cnn")
    options: Json = {"window": 8, "stride": 4} if method == "occlusion" else {"steps": 40}
    reply = ask(served, x, method=method, model="cnn", objective=objective, **options)
    images, scores = torch.from_numpy(x), lambda rows: score(module(rows))
    if method == "occlusion":
        wanted = Occlusion(scores).attribute(images, (3, 8, 8), (3, 4, 4))[:, 0]
    else:
        wanted = IntegratedGradients(scores).attribute(images, n_steps=40).float()
    assert_close(arrays_of(reply)[method], wanted)
    assert "classes" not in reply.json()["receipts"][method]


def test_grad_cam_plusplus(served: Live) -> None:
    """By the paper's own derivatives of exp(S), each taken by autograd, at a layer that S is linear in."""
    x = random_images(2, 5)
    module: Any = module_of(served, "cnn").double()
    maps = []
    for image in torch.from_numpy(x).double():
        values = module.features(image[None]).detach()

        def score(flat: Tensor, like: Tensor = values) -> Tensor:
            return module.head(flat.view_as(like).mean((2, 3)))[0, 2]

        flat = values.flatten()
        factor = score(flat)

        def exponential(flat: Tensor, factor: Tensor = factor) -> Tensor:
            return (score(flat) - factor).exp()  # what scales Y scales its derivatives alike

        first, second, third = [], [], []
        for place in range(len(flat)):
            shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
            along = exponential(flat + shift * nn.functional.one_hot(torch.tensor(place), len(flat)))
            slope = torch.autograd.grad(along, shift, create_graph=True)[0]
            curve = torch.autograd.grad(slope, shift, create_graph=True)[0]
            third.append(torch.autograd.grad(curve, shift)[0])
            first.append(slope.detach())
            second.append(curve.detach())
        slopes, curves, thirds = (torch.stack(each).view_as(values)[0] for each in (first, second, third))
        alphas = curves / (2 * curves + values[0].sum((1, 2), keepdim=True) * thirds)
        weights = (alphas * slopes.relu()).sum((1, 2))
        maps.append((weights[:, None, None] * values[0]).sum(0).relu().numpy())
    body = {"model": "cnn", "layer": "features", "objective": {"class": 2}}
    found = explained(served, x, "grad_cam_plusplus", **body)
    assert_close(found, np.stack(maps))
    assert (found >= 0).all()
    assert not np.allclose(found, explained(served, x, "grad_cam", **body), rtol=0.1)


@pytest.mark.parametrize("baseline", [0.5, "blur", {"input": 1}])
@pytest.mark.parametrize("method", ["occlusion", "integrated_gradients"])
def test_baselines(served: Live, method: str, baseline: float | str | Json) -> None:
    """Of captum, from one value everywhere, from the picture as torchvision blurs it, or from another one."""
    x = random_images(2, 4)
    module, images = module_of(served, "cnn"), torch.from_numpy(x)
    blurred = gaussian_blur(images.double(), [11, 11], [1.6, 1.6]).float()  # of 32 pixels
    base = blurred if baseline == "blur" else torch.full_like(images, 0.5)
    base = images[1:] if isinstance(baseline, dict) else base
    options: Json = {"window": 8, "stride": 4} if method == "occlusion" else {"steps": 40}
    found = ask(served, x, method=method, model="cnn", baseline=baseline, objective={"class": 1}, **options)
    if method == "occlusion":
        wanted = Occlusion(module).attribute(images, (3, 8, 8), (3, 4, 4), baselines=base, target=1)[:, 0]
    else:
        wanted = IntegratedGradients(module).attribute(images, base, target=1, n_steps=40).float()
    assert_close(arrays_of(found)[method], wanted)
    plain, zeros = (
        ask(served, x, method=method, model="cnn", objective={"class": 1}, **options, **more).json()["fingerprint"]
        for more in ({}, {"baseline": 0})
    )
    assert found.json()["fingerprint"] != plain == zeros


@pytest.mark.parametrize("kind", ["one left out", "classes of their own"])
def test_baseline_among_others(served: Live, kind: str) -> None:
    """The index counts all inputs, also one that is left out, and those that are explained apart."""
    x = random_images(2, 4)
    images, inputs = torch.from_numpy(x), [tensor(row) for row in x]
    body: Json = {"model": "cnn", "method": "integrated_gradients", "steps": 40, "encoding": "base64"}
    if kind == "one left out":
        body |= {"on_error": "skip", "objective": {"class": 1}, "baseline": {"input": 2}}
        inputs = [{"image": "AAAA"}, *inputs]
    else:
        body |= {"baseline": {"input": 1}}
        inputs = [each | {"class": 1 + number} for number, each in enumerate(inputs)]
    found = arrays_of(served.client.post("/explain", json=body | {"inputs": inputs}))["integrated_gradients"]
    wanted = IntegratedGradients(module_of(served, "cnn")).attribute(images[:1], images[1:], target=1, n_steps=40)
    assert_close(found[:1], wanted.float())
    assert not found[1].any()


@pytest.mark.parametrize(("model", "layer"), [("cnn", None), ("resnet", "layer1")])
def test_ablation_cam(served: Live, model: str, layer: str | None) -> None:
    """Of a layer by name, or of the last one, with a hook that takes each channel away."""
    x, taken = random_images(2, 5), list[Tensor]()
    module = module_of(served, model)
    part = module.get_submodule(layer or "features")
    part.register_forward_hook(lambda part, args, output: taken.append(output.detach().clone()))
    whole = module(torch.from_numpy(x)).detach()[:, 2]
    values, weights = taken[0], []
    for channel in range(values.shape[1]):
        kept = torch.ones(values.shape[1])
        kept[channel] = 0
        handle = part.register_forward_hook(lambda part, args, output, kept=kept: output * kept[:, None, None])
        weights.append((whole - module(torch.from_numpy(x)).detach()[:, 2]) / whole)
        handle.remove()
    wanted = (torch.stack(weights, 1)[:, :, None, None] * values).sum(1).relu()
    named = {} if layer is None else {"layer": layer}
    reply = ask(served, x, model=model, method="ablation_cam", objective={"class": 2}, **named)
    assert_close(arrays_of(reply)["ablation_cam"], wanted)
    assert reply.json()["receipts"]["ablation_cam"]["layer"] == (layer or "features")


def compute_cam(method: str, values: Tensor, slopes: Tensor) -> Tensor:
    """What pytorch-grad-cam computes of a layer's values and gradients, (C, H, W), before it scales the map."""
    if method == "eigen_cam":
        flat = values.flatten(1).T
        positions, sizes, _ = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
        found = (positions[:, 0] * sizes[0]).view(values.shape[1:])
        return (found * torch.sign((found * values.mean(0)).sum())).relu()
    weights = {
        "hires_cam": slopes,
        "layer_cam": slopes.relu(),
        "xgrad_cam": (slopes * values / (values.sum((1, 2), keepdim=True) + 1e-7)).sum((1, 2), keepdim=True),
    }[method]
    return (weights * values).sum(0).relu()


@pytest.mark.parametrize("method", ["hires_cam", "layer_cam", "xgrad_cam", "eigen_cam"])
@pytest.mark.parametrize(("model", "layer"), [("cnn", "features")])
def test_other_cams(served: Live, model: str, layer: str, method: str) -> None:
    """Of a layer's values and gradients, as autograd gives them."""
    x = random_images(2, 5)
    module, taken = module_of(served, model), list[Tensor]()
    module.get_submodule(layer).register_forward_hook(lambda module, args, output: taken.append(output))
    scores = module(torch.from_numpy(x).requires_grad_())
    (slopes,) = torch.autograd.grad(scores[:, 1].sum(), taken)
    maps = [compute_cam(method, *pair) for pair in zip(taken[0].detach(), slopes, strict=True)]
    objective = {} if method == "eigen_cam" else {"objective": {"class": 1}}
    assert_close(explained(served, x, method, model=model, layer=layer, **objective), torch.stack(maps))


def test_eigen_cam_of_no_layer(served: Live) -> None:
    """Without a layer it is of the last one with maps, and no class is asked for."""
    x = random_images(2, 5)
    named = explained(served, x, "eigen_cam", model="cnn", layer="features")
    assert_close(explained(served, x, "eigen_cam", model="cnn"), named)
    refused = ask(served, x, method="eigen_cam", model="cnn", classes=[1])
    assert "of no class" in problem(refused, 422)["detail"]
    refused = ask(served, x, method="eigen_cam", model="cnn", objective={"class": 1})
    assert "takes no objective" in problem(refused, 422)["detail"]
    inputs = [tensor(row) | {"class": klass} for row, klass in zip(x, (1, 3), strict=True)]
    body: Json = {"model": "cnn", "method": ["eigen_cam", "layer_cam"], "encoding": "base64", "inputs": inputs}
    assert_close(arrays_of(served.client.post("/explain", json=body))["eigen_cam"], named)


def test_several_methods_and_classes(served: Live) -> None:
    """A map of each under METHOD.CLASS, each as it is when asked for alone, with its own fingerprint."""
    x = random_images(2, 6)
    methods = ["grad_cam", "saliency", "guided_backpropagation", "occlusion"]
    reply = ask(served, x, model="cnn", method=methods, classes=["top", 2], window=8, stride=8)
    found, document = arrays_of(reply), reply.json()
    assert list(found) == [f"{method}.{klass}" for method in methods for klass in ("top", 2)]
    prints = {receipt["fingerprint"] for receipt in document["receipts"].values()}
    assert len(prints) == len(found)
    assert document["fingerprint"] not in prints
    for key, array in found.items():
        method, klass = key.split(".")
        alone_body: Json = {"objective": {"class": 2}} if klass == "2" else {}
        options = {"window": 8, "stride": 8} if method == "occlusion" else {}
        alone = ask(served, x, model="cnn", method=method, **alone_body, **options)
        assert_close(array, arrays_of(alone)[method])
        if klass == "2":
            assert alone.json()["receipts"][method]["fingerprint"] == document["receipts"][key]["fingerprint"]
    both = ask(served, x, model="vit", method=["attention_rollout", "saliency"], classes=[1])
    assert list(arrays_of(both)) == ["attention_rollout", "saliency.1"]


@pytest.mark.parametrize(
    "method",
    ["grad_cam_plusplus", "xgrad_cam", "guided_backpropagation", "integrated_gradients", "occlusion", "relevance"],
)
def test_a_class_of_each_row(served: Live, method: str) -> None:
    """An input's own class is that of its row, whatever the others ask for."""
    model = "vit" if method in ("gradient_rollout", "relevance") else "cnn"
    x = random_images(2, 7)
    inputs = [tensor(row) | {"class": klass} for row, klass in zip(x, (1, 3), strict=True)]
    body: Json = {"model": model, "method": method, "encoding": "base64"}
    reply = served.client.post("/explain", json={**body, "inputs": inputs})
    found = arrays_of(reply)[method]
    assert reply.json()["receipts"][method]["classes"] == [1, 3]
    for row, klass in enumerate((1, 3)):
        assert_close(
            found[row : row + 1], explained(served, x[row : row + 1], method, model=model, objective={"class": klass})
        )


def test_top_classes(served: Live) -> None:
    """Scores, softmax and names of each row's best classes, as the model gives them; none where none are wanted."""
    x = random_images(3, 8)
    scores = module_of(served, "cnn")(torch.from_numpy(x)).detach()
    reply = ask(served, x, model="cnn", method="integrated_gradients", steps=2)
    for row, best in enumerate(reply.json()["top_classes"]):
        order = scores[row].argsort(descending=True).tolist()
        assert [each["class"] for each in best] == order
        assert [each["label"] for each in best] == [LABELS["cnn"][number] for number in order]
        np.testing.assert_allclose([each["score"] for each in best], scores[row][order], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose([each["probability"] for each in best], scores[row].softmax(0)[order], rtol=1e-3)
    asked: Json = {"model": "cnn", "method": "saliency"}
    with_none = ask(served, x, **asked, top_classes=0)
    assert "top_classes" not in with_none.json()
    assert with_none.json()["fingerprint"] == ask(served, x, **asked).json()["fingerprint"]
    body = {"inputs": [tensor(row) for row in x], **asked, "top_classes": 2}
    file = served.client.post("/explain", json=body, params={"format": "safetensors"})
    assert [len(row) for row in json.loads(metadata(file)["top_classes"])] == [2, 2, 2]
    rolled = ask(served, x, model="vit", method="attention_rollout", top_classes=3)
    assert [len(row) for row in rolled.json()["top_classes"]] == [3, 3, 3]
    assert "label" not in rolled.json()["top_classes"][0][0]


def test_inputs_of_several_shapes(served: Live) -> None:
    """Each is explained in its own pixels."""
    shapes = [(3, 32, 32), (3, 40, 24)]
    x = [np.random.default_rng(row).standard_normal(shape).astype(np.float32) for row, shape in enumerate(shapes)]
    body = {"model": "cnn", "method": ["occlusion", "integrated_gradients"], "steps": 3, "encoding": "base64"}
    reply = served.client.post("/explain", json={**body, "inputs": [tensor(row) for row in x]})
    found = arrays_of(reply)
    assert len(reply.json()["top_classes"]) == 2
    for row, image in enumerate(x):
        assert found[f"occlusion.input{row}"].shape == (1, *image.shape[1:])
        alone = explained(served, image[None], "integrated_gradients", model="cnn", steps=3)
        assert_close(found[f"integrated_gradients.input{row}"], alone)


BAD: dict[str, tuple[Json, int, str]] = {
    "too many steps": ({"method": "integrated_gradients", "steps": 513}, 422, "/steps"),
    "too many windows": ({"method": "occlusion", "window": 1, "stride": 1, "inputs": 20}, 413, ""),
    "classes beside terms": ({"method": "saliency", "classes": [1], "objective": {"terms": [[1, 2]]}}, 422, "/classes"),
    "baseline of saliency": ({"method": "saliency", "baseline": 1}, 422, ""),
    "rule of another method": ({"method": ["grad_cam", "occlusion"], "rule": "vit-explain"}, 422, ""),
    "steps of saliency": ({"method": "saliency", "steps": 5}, 422, ""),
    "an unknown class": ({"method": ["saliency"], "classes": ["top", 5]}, 422, "/classes/1"),
    "a class twice": ({"method": "saliency", "classes": [1, 1]}, 422, "/classes"),
    "classes of a rollout": ({"model": "vit", "method": "attention_rollout", "classes": [1]}, 422, ""),
    "no ReLU": ({"model": "vit", "method": "guided_backpropagation"}, 422, ""),
    "functional ReLU": ({"model": "functional", "method": "guided_backpropagation"}, 422, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused(served: Live, kind: str) -> None:
    """Before any forward, with the place and what to type instead."""
    body, status, pointer = BAD[kind]
    inputs = [tensor(row) for row in random_images(body.get("inputs", 1), 5)]
    entry = served.engine.manager.registry.get_entry("cnn")
    told = problem(served.client.post("/explain", json={"model": "cnn", **body, "inputs": inputs}), status)
    assert not pointer or told["errors"][0]["pointer"] == pointer
    assert entry.model is not None
    assert entry.model.hooks == 0


def test_text_models_are_refused(serve: Serve, live: Live) -> None:
    """Pictures alone have maps."""
    for method in ("integrated_gradients", "occlusion", "guided_backpropagation"):
        body = {"model": "encoder", "method": method, "inputs": [tensor(np.zeros((5, 8), np.float32))]}
        problem(live.client.post("/explain", json=body), 422)


def test_a_client_that_goes_away(served: Live) -> None:
    """What was asked for ends with the chunk that is under way: no hook and no place in the queue is left."""
    body = {"model": "resnet", "method": "occlusion", "stride": 1, "inputs": [tensor(random_images(1, 5)[0])]}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/explain", json=body, timeout=0.2)
    wait_until(lambda: served.engine.admission.used_bytes == 0)
    wait_until(lambda: not any(served.engine.take_snapshot().hooks.values()))
    explained(served, random_images(1, 5), "saliency", model="resnet")


def test_in_worker_processes(served: Live, serve: Serve) -> None:
    """The same maps come of models in other processes."""
    spec = ModelSpec("cnn", MODELS["cnn"], weights="random:5", inputs=(PICTURE,), preprocess="none")
    x, methods = random_images(2, 9), ["guided_backpropagation", "integrated_gradients", "occlusion"]
    wanted = arrays_of(ask(served, x, model="cnn", method=methods, classes=["top", 1]))
    with serve(configured(spec), workers=1) as live:
        found = arrays_of(ask(live, x, model="cnn", method=methods, classes=["top", 1]))
    assert list(found) == list(wanted)
    for key, array in found.items():
        assert_close(array, wanted[key])
