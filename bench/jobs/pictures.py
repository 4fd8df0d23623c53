"""Maps and pictures: what a network looks at, what it sees, what it would like to see."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from bench.jobs.lab import Array, Arrays, Lab

CAMS = {
    "grad_cam": "GradCAM",
    "grad_cam_plusplus": "GradCAMPlusPlus",
    "hires_cam": "HiResCAM",
    "layer_cam": "LayerCAM",
    "xgrad_cam": "XGradCAM",
    "ablation_cam": "AblationCAM",
    "score_cam": "ScoreCAM",
    "eigen_cam": "EigenCAM",
}
DETECTOR = ["backbone.fpn.layer_blocks.0", "roi_heads.box_head", "roi_heads.box_predictor.cls_score"]
NEURON = {"kind": "layer", "layer": "layer3", "channel": 5, "position": [7, 7]}
RATE = 0.1  # of a step along the gradient


def cams_by_request(lab: Lab) -> Arrays:
    options = {"model": "resnet18", "objective": {"class": 7}, "rule": "pytorch-grad-cam"}
    found = lab.client.explain(lab.batch[:1], list(CAMS), layer="layer2", **options)
    return {name: show(value) for name, value in found.items()}


def cams_by_script(lab: Lab) -> Arrays:
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    found = {}
    for name, method in CAMS.items():
        with getattr(pytorch_grad_cam, method)(model=lab.resnet, target_layers=[lab.resnet.layer2]) as cam:
            cam.get_cam_image = agree(cam.get_cam_image) if method == "EigenCAM" else cam.get_cam_image
            found[name] = cam(lab.batch[:1].clone().requires_grad_(), [ClassifierOutputTarget(7)])
    return found


def agree(compute_maps: Any) -> Any:
    """Eigen-CAM with the sign that agrees with the channels' mean; the library leaves it to chance."""

    def compute(row: Any, layer: Any, targets: Any, values: Array, *rest: Any) -> Array:
        maps = compute_maps(row, layer, targets, values, *rest)
        return maps * np.sign((maps * values.mean(1)).sum())

    return compute


def show(maps: Array) -> Array:
    """Maps as large as pictures, from 0 to 1 before and after that: as pytorch-grad-cam shows them."""
    large = interpolate(torch.from_numpy(scale(maps))[:, None], size=(224, 224), mode="bilinear")
    return scale(large[:, 0].numpy())


def scale(maps: Array) -> Array:
    """Maps from 0 to 1."""
    maps = maps - maps.min((1, 2), keepdims=True)
    return maps / (1e-7 + maps.max((1, 2), keepdims=True))


def integrated_by_request(lab: Lab) -> Arrays:
    # Of a ViT: in a ResNet rounding flips ReLUs and maxima, so that Captum in float32 and float64 differs by 2e-3.
    found, method = {}, "integrated_gradients"
    for name, baseline in {"zero": 0, "dark": -1.5, "other": {"input": 1}}.items():
        options = {"model": "vit", "objective": {"class": 7}, "steps": 10, "baseline": baseline}
        found[name] = lab.client.explain(list(lab.batch[:2]), method, **options)[method]
    return found


def integrated_by_script(lab: Lab) -> Arrays:
    from captum.attr import IntegratedGradients

    explain, baselines = IntegratedGradients(lab.vit).attribute, {"zero": 0, "dark": -1.5, "other": lab.batch[1:2]}
    return {name: explain(lab.batch[:2], each, target=7, n_steps=10).numpy() for name, each in baselines.items()}


def attribution_by_request(lab: Lab) -> Arrays:
    row, logit = lab.batch[:1], {"class": 7}
    guided = lab.client.explain(row, "guided_backpropagation", objective=logit, model="resnet18")
    methods, sizes = ["saliency", "occlusion"], {"window": 32, "stride": 32}
    return {**guided, **lab.client.explain(row, methods, objective=logit, model="vit", **sizes)}


def attribution_by_script(lab: Lab) -> Arrays:
    from captum.attr import GuidedBackprop, Occlusion, Saliency

    row = lab.batch[:1].clone().requires_grad_()
    guided = GuidedBackprop(lab.resnet).attribute(row, target=7)
    saliency = Saliency(lab.vit).attribute(row, target=7).amax(1)
    sizes = {"sliding_window_shapes": (3, 32, 32), "strides": (3, 32, 32)}
    occlusion = Occlusion(lab.vit).attribute(row, target=7, **sizes)[:, 0]
    found = {"guided_backpropagation": guided, "saliency": saliency, "occlusion": occlusion}
    return {name: value.detach().numpy() for name, value in found.items()}


def receptive_field_by_request(lab: Lab) -> Arrays:
    return lab.client.extract(list(lab.batch[:8]), ".:grad_input", model="resnet18", objective=NEURON)


def receptive_field_by_script(lab: Lab) -> Arrays:
    rows, kept = lab.batch[:8].clone().requires_grad_(), []
    handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output: kept.append(output))
    lab.resnet(rows)
    handle.remove()
    (gradient,) = torch.autograd.grad(kept[0][:, 5, 7, 7].sum(), rows)
    return {".:grad_input": gradient.numpy()}


def rollout_by_request(lab: Lab) -> Arrays:
    return lab.client.explain(lab.batch, "attention_rollout", model="patches")


def rollout_by_script(lab: Lab) -> Arrays:
    with torch.no_grad():
        layers = lab.patches(lab.batch, output_attentions=True).attentions
    rollout = torch.eye(197)
    for attention in layers:
        mixed = attention.mean(1) + torch.eye(197)
        rollout = mixed / mixed.sum(-1, keepdim=True) @ rollout
    return {"attention_rollout": rollout[:, 0, 1:].unflatten(1, (14, 14)).numpy()}


def inversion_by_request(lab: Lab) -> Arrays:
    wanted = lab.client.extract(lab.batch[:1], "blocks.5", model="vit")["blocks.5"][0]
    options = {"model": "vit", "minimise": True, "objective": {"kind": "norm", "layer": "blocks.5"}}
    options["interventions"] = [{"layer": "blocks.5", "op": "add", "tensor": -wanted}]
    return {"row": lab.client.optimise([np.zeros_like(lab.batch[0])], 16, RATE, **options)["input"]}


def inversion_by_script(lab: Lab) -> Arrays:
    kept, row = [], torch.zeros_like(lab.batch[:1], requires_grad=True)
    handle = lab.vit.blocks[5].register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        lab.vit(lab.batch[:1])
    optimizer = torch.optim.SGD([row], lr=RATE)
    for _ in range(16):
        optimizer.zero_grad()
        lab.vit(row)
        (kept[-1] - kept[0]).norm().backward()
        optimizer.step()
    handle.remove()
    return {"row": row.detach().numpy()}


def dream_by_request(lab: Lab) -> Arrays:
    options = {"model": "resnet18", "rule": "scaled", "objective": {"kind": "norm", "layer": "layer3"}}
    return {"row": lab.client.optimise(lab.batch[:1], 1, RATE, **options)["input"]}


def dream_by_script(lab: Lab) -> Arrays:
    row, kept = lab.batch[:1].clone().requires_grad_(), []
    handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output: kept.append(output))
    lab.resnet(row)
    handle.remove()
    kept[0].norm().backward()
    return {"row": (row + RATE * row.grad / row.grad.abs().mean()).detach().numpy()}


def detector_by_request(lab: Lab) -> Arrays:
    found = lab.client.extract(list(lab.frames), DETECTOR, model="detector")
    parts = {name: [each for key, each in found.items() if key.startswith(name)] for name in DETECTOR}
    return {name: np.concatenate([each.reshape(-1) for each in values]) for name, values in parts.items()}


def detector_by_script(lab: Lab) -> Arrays:
    kept: dict[str, list[Array]] = {name: [] for name in DETECTOR}

    def keep(name: str, module: Any, args: Any, output: Any) -> None:
        kept[name].append(output.numpy())

    handles = [lab.detector.get_submodule(name).register_forward_hook(partial(keep, name)) for name in DETECTOR]
    with torch.no_grad():
        for frame in lab.frames:
            lab.detector([frame])
    for handle in handles:
        handle.remove()
    return {name: np.concatenate(values).reshape(-1) for name, values in kept.items()}
