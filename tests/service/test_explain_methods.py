"""More methods of ``POST /explain``, against captum and torch on equal weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
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
from tests.service.conftest import Serve, server_of
from tests.service.digits_reference import random_images
from tests.service.gated_server import wait_until
from tests.service.support import Array, Json, arrays_of, configured, metadata, problem, tensor

PICTURE = InputSpec("x", (3, 32, 32))
MODELS = {
    "cnn": "python:tests.service.nets_http:Cnn",
    "resnet": "python:tests.nets:resnet",
    "vit": "python:tests.nets:vit",
    "functional": "python:tests.service.nets_http:FunctionalRelu",
    "partly": "python:tests.service.nets_http:PartlyGuided",
}


LABELS = {"cnn": ("ant", "bee", "cat", "dog", "eel")}
SPECS = [
    ModelSpec(name, source, weights="random:5", inputs=(PICTURE,), preprocess="none", labels=LABELS.get(name))
    for name, source in MODELS.items()
]
served = server_of(*SPECS)


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


CLASS = 1
Compute = Callable[[nn.Module, Tensor], Tensor]


def occlude(net: Any, x: Tensor, side: int, stride: int, **options: Any) -> Tensor:
    """Captum's drop of the score, mean over the windows that cover a pixel, of which the channels have one."""
    chosen = {"target": CLASS, "baselines": 0, **options}
    return Occlusion(net).attribute(x, (3, side, side), (3, stride, stride), **chosen)[:, 0]


def integrate(net: Any, x: Tensor, base: Any = None) -> Tensor:
    return IntegratedGradients(net).attribute(x, base, target=CLASS, n_steps=40)


def guide(net: Any, x: Tensor) -> Tensor:
    return GuidedBackprop(net).attribute(x.requires_grad_(), target=CLASS)


def smooth(net: Any, x: Tensor) -> Tensor:
    """The mean of captum's gradients over copies with the documented noise."""
    total = torch.zeros_like(x)
    for number in range(12):
        noise = torch.from_numpy(np.random.default_rng([7, number]).standard_normal((3, 32, 32)))
        noisy = torch.stack([row + 0.2 * (row.max() - row.min()) * noise for row in x]).float()
        total += Saliency(net).attribute(noisy.requires_grad_(), target=CLASS, abs=False)
    return total / 12


def ablate(net: Any, x: Tensor) -> Tensor:
    """The last layer's maps, weighted by the share of the score that goes with each channel."""
    values, whole, weights = net.features(x), net(x)[:, CLASS], []
    for channel in range(values.shape[1]):
        kept = torch.ones(values.shape[1])
        kept[channel] = 0
        with net.features.register_forward_hook(lambda part, args, out, kept=kept: out * kept[:, None, None]):
            weights.append((whole - net(x)[:, CLASS]) / whole)
    return (torch.stack(weights, 1)[:, :, None, None] * values).sum(1).relu()


def mask_by_channels(net: Any, x: Tensor) -> Tensor:
    """What pytorch-grad-cam's ScoreCAM computes, written down."""
    values = net.features(x)
    masks = nn.UpsamplingBilinear2d(size=(32, 32))(values)
    low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
    masked = x[:, None] * ((masks - low) / (high - low + 1e-8))[:, :, None]
    weights = torch.stack([net(row)[:, CLASS] for row in masked]).softmax(1)
    return (weights[:, :, None, None] * values).sum(1).relu()


def compute_cam(method: str, values: Tensor, slopes: Tensor) -> Tensor:
    """What pytorch-grad-cam computes of a layer's values and gradients, (C, H, W), before it scales the map."""
    if method == "eigen_cam":
        flat = values.flatten(1).T
        positions, sizes, _ = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
        found = (positions[:, 0] * sizes[0]).view(values.shape[1:])
        return (found * torch.sign((found * values.mean(0)).sum())).relu()
    total = values.sum((1, 2), keepdim=True)
    weights = {
        "grad_cam_plusplus": (slopes**2 / (2 * slopes**2 + total * slopes**3) * slopes.relu()).sum(
            (1, 2), keepdim=True
        ),
        "hires_cam": slopes,
        "layer_cam": slopes.relu(),
        "xgrad_cam": (slopes * values / (total + 1e-7)).sum((1, 2), keepdim=True),
    }[method]
    return (weights * values).sum(0).relu()


def cam(method: str) -> Compute:
    """A map of the last layer's values and gradients, as autograd gives them."""

    def compute(net: Any, x: Tensor) -> Tensor:
        values = net.features(x).detach().requires_grad_()
        (slopes,) = torch.autograd.grad(net.head(values.mean((2, 3)))[:, CLASS].sum(), values)
        return torch.stack([compute_cam(method, *pair) for pair in zip(values.detach(), slopes, strict=True)])

    return compute


def blur(x: Tensor) -> Tensor:
    return gaussian_blur(x.double(), [11, 11], [1.6, 1.6]).float()  # of 32 pixels


WINDOW: Json = {"window": 8, "stride": 4}
# The method and a word for the case; a model, what is asked of it, and the reference's map of its module and pictures.
METHODS: dict[str, tuple[str, Json, Compute]] = {
    "saliency": ("cnn", {}, lambda net, x: Saliency(net).attribute(x.requires_grad_(), target=CLASS).amax(1)),
    "guided_backpropagation": ("cnn", {}, guide),
    "guided_backpropagation, in place": ("resnet", {}, guide),
    "integrated_gradients": ("vit", {"steps": 40}, integrate),
    "integrated_gradients, blurred": (
        "cnn",
        {"steps": 40, "baseline": "blur"},
        lambda net, x: integrate(net, x, blur(x)),
    ),
    "integrated_gradients, another": (
        "cnn",
        {"steps": 40, "baseline": {"input": 1}},
        lambda net, x: integrate(net, x, x[1:]),
    ),
    "smoothgrad": ("cnn", {"samples": 12, "noise": 0.2, "seed": 7}, smooth),
    "occlusion": ("cnn", {"window": 5, "stride": 3}, lambda net, x: occlude(net, x, 5, 3)),
    "occlusion, one window": ("cnn", {"window": 32, "stride": 1}, lambda net, x: occlude(net, x, 32, 1)),
    "occlusion, 0.5": ("cnn", WINDOW | {"baseline": 0.5}, lambda net, x: occlude(net, x, 8, 4, baselines=0.5)),
    "occlusion, two classes": (
        "cnn",
        WINDOW | {"objective": {"terms": [[1, 3], [-2, 0]]}},
        lambda net, x: occlude(lambda rows: net(rows)[:, 3] - 2 * net(rows)[:, 0], x, 8, 4, target=None),
    ),
    "ablation_cam": ("cnn", {}, ablate),
    "score_cam": ("cnn", {}, mask_by_channels),
    **{
        method: ("cnn", {}, cam(method))
        for method in ("grad_cam_plusplus", "hires_cam", "layer_cam", "xgrad_cam", "eigen_cam")
    },
}


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")  # captum says so each time
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_reference(served: Live, name: str) -> None:
    """Of captum, or by hand, in the model's own pixels."""
    model, body, compute = METHODS[name]
    x, method = random_images(2, 4), name.partition(",")[0]
    objective = {} if method == "eigen_cam" else {"objective": {"class": CLASS}}
    reply = ask(served, x, model=model, method=method, **objective | body)
    assert_close(arrays_of(reply)[method], compute(module_of(served, model), torch.from_numpy(x)).float())


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")
def test_unguided_functions_are_named(served: Live) -> None:
    """Captum guides a ReLU that is a part and no other; here the reply says whose forward has others."""
    x = random_images(2, 4)
    reply = ask(served, x, method="guided_backpropagation", model="partly", objective={"class": 1})
    wanted = GuidedBackprop(module_of(served, "partly")).attribute(torch.from_numpy(x).requires_grad_(), target=1)
    assert_close(arrays_of(reply)["guided_backpropagation"], wanted)
    assert reply.json()["warnings"] == ["ReLUs that are functions were not guided, in the forward of: '.', 'conv.2'"]
    assert "warnings" not in ask(served, x, method="guided_backpropagation", model="resnet").json()


BASELINES: tuple[Json, ...] = ({}, {"baseline": 0}, {"baseline": 0.5})


def test_baseline_among_others(served: Live) -> None:
    """The index counts all inputs, also one that is left out, and those that are explained apart."""
    x = random_images(2, 4)
    images, inputs = torch.from_numpy(x), [tensor(row) | {"class": 1 + number} for number, row in enumerate(x)]
    body: Json = {"model": "cnn", "method": "integrated_gradients", "steps": 40, "encoding": "base64"}
    body |= {"on_error": "skip", "baseline": {"input": 2}, "inputs": [{"image": "AAAA"}, *inputs]}
    found = arrays_of(served.client.post("/explain", json=body))["integrated_gradients"]
    wanted = IntegratedGradients(module_of(served, "cnn")).attribute(images[:1], images[1:], target=1, n_steps=40)
    assert_close(found[:1], wanted.float())
    assert not found[1].any()
    prints = [ask(served, x, model="cnn", method="occlusion", **more).json()["fingerprint"] for more in BASELINES]
    assert prints[0] == prints[1] != prints[2]


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
    "unknown method": ({"method": "lime"}, 422, "/method"),
    "a layer that is no map": ({"method": "grad_cam", "layer": "head"}, 422, ""),
    "a layer for saliency": ({"method": "saliency", "layer": "features"}, 422, ""),
    "a model without attention": ({"method": "attention_rollout"}, 422, ""),
    "classes of no class": ({"method": "eigen_cam", "classes": [1]}, 422, ""),
    "an objective of no class": ({"method": "eigen_cam", "objective": {"class": 1}}, 422, ""),
    "too many steps": ({"method": "integrated_gradients", "steps": 513}, 422, "/steps"),
    "too many windows": ({"method": "occlusion", "window": 1, "stride": 1, "inputs": 20}, 413, ""),
    "classes beside terms": ({"method": "saliency", "classes": [1], "objective": {"terms": [[1, 2]]}}, 422, "/classes"),
    "baseline of saliency": ({"method": "saliency", "baseline": 1}, 422, ""),
    "an unknown class": ({"method": ["saliency"], "classes": ["top", 5]}, 422, "/classes/1"),
    "classes of a rollout": ({"model": "vit", "method": "attention_rollout", "classes": [1]}, 422, ""),
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


def test_a_client_that_goes_away(served: Live) -> None:
    """What was asked for ends with the chunk that is under way: no hook and no place in the queue is left."""
    body = {"model": "resnet", "method": "smoothgrad", "samples": 500, "inputs": [tensor(random_images(1, 5)[0])]}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/explain", json=body, timeout=0.1)
    wait_until(lambda: served.engine.admission.used_bytes == 0)
    wait_until(lambda: not any(served.engine.take_snapshot()["model_hooks"].values()))
    explained(served, random_images(1, 5), "saliency", model="resnet")


@pytest.mark.slow
def test_in_worker_processes(served: Live, serve: Serve) -> None:
    """The same maps come of models in other processes."""
    x, methods = random_images(2, 9), ["guided_backpropagation", "integrated_gradients", "occlusion"]
    wanted = arrays_of(ask(served, x, model="cnn", method=methods, classes=["top", 1]))
    with serve(configured(SPECS[0]), workers=1) as live:
        found = arrays_of(ask(live, x, model="cnn", method=methods, classes=["top", 1]))
    assert list(found) == list(wanted)
    for key, array in found.items():
        assert_close(array, wanted[key])
