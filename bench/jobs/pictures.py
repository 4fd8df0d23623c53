"""Maps and pictures: what a network looks at, what it sees, what it would like to see."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from bench.jobs.lab import Array, Arrays, Lab

CAMS = {  # not Eigen-CAM, whose sign is an accident there
    "grad_cam": "GradCAM",
    "grad_cam_plusplus": "GradCAMPlusPlus",
    "hires_cam": "HiResCAM",
    "layer_cam": "LayerCAM",
    "xgrad_cam": "XGradCAM",
    "ablation_cam": "AblationCAM",
}
NEURON = {"kind": "layer", "layer": "layer3", "channel": 5, "position": [7, 7]}
RATE = 0.1  # of a step along the gradient


def cams_by_request(lab: Lab) -> Arrays:
    options = {"model": "resnet18", "objective": {"class": 7}, "rule": "pytorch-grad-cam"}
    found = lab.client.explain(lab.batch[:1], list(CAMS), layer="layer3", **options)
    return {name: show(value) for name, value in found.items()}


def cams_by_script(lab: Lab) -> Arrays:
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    found = {}
    for name, method in CAMS.items():
        with getattr(pytorch_grad_cam, method)(model=lab.resnet, target_layers=[lab.resnet.layer3]) as cam:
            found[name] = cam(lab.batch[:1].clone().requires_grad_(), [ClassifierOutputTarget(7)])
    return found


def show(maps: Array) -> Array:
    """Maps as large as pictures, from 0 to 1 before and after that: as pytorch-grad-cam shows them."""
    large = interpolate(torch.from_numpy(scale(maps))[:, None], size=(224, 224), mode="bilinear")
    return scale(large[:, 0].numpy())


def scale(maps: Array) -> Array:
    """Maps from 0 to 1."""
    maps = maps - maps.min((1, 2), keepdims=True)
    return maps / (1e-7 + maps.max((1, 2), keepdims=True))


def integrated_by_request(lab: Lab) -> Arrays:
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
    return lab.client.explain(lab.batch[:4], "attention_rollout", model="patches")


def rollout_by_script(lab: Lab) -> Arrays:
    with torch.no_grad():
        layers = lab.patches(lab.batch[:4], output_attentions=True).attentions
    rollout = torch.eye(197)
    for attention in layers:
        mixed = attention.mean(1) + torch.eye(197)
        rollout = mixed / mixed.sum(-1, keepdim=True) @ rollout
    return {"attention_rollout": rollout[:, 0, 1:].unflatten(1, (14, 14)).numpy()}


def inversion_by_request(lab: Lab) -> Arrays:
    target, row = lab.client.extract(lab.batch[:1], "blocks.5", model="vit")["blocks.5"], np.zeros_like(lab.batch[1:2])
    for _ in range(8):
        state = lab.client.extract(row, "blocks.5", model="vit")["blocks.5"]
        edit = {"layer": "blocks.5", "site": "grad_output", "op": "replace", "tensor": state[0] - target[0]}
        objective = {"kind": "layer", "layer": "blocks.5"}
        options = {"model": "vit", "objective": objective, "interventions": [edit]}
        row = row - RATE * lab.client.extract(list(row), ".:grad_input", **options)[".:grad_input"]
    return {"row": row}


def inversion_by_script(lab: Lab) -> Arrays:
    kept, row = [], torch.zeros_like(lab.batch[:1], requires_grad=True)
    handle = lab.vit.blocks[5].register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        lab.vit(lab.batch[:1])
    optimizer = torch.optim.SGD([row], lr=RATE)
    for _ in range(8):
        optimizer.zero_grad()
        lab.vit(row)
        ((kept[-1] - kept[0]) ** 2).sum().div(2).backward()
        optimizer.step()
    handle.remove()
    return {"row": row.detach().numpy()}


def dream_by_request(lab: Lab) -> Arrays:
    objective = {"kind": "norm", "layer": "layer3"}
    gradient = lab.client.extract(lab.batch[:1], ".:grad_input", model="resnet18", objective=objective)[".:grad_input"]
    return {"row": lab.batch[:1].numpy() + RATE * gradient / np.abs(gradient).mean()}


def dream_by_script(lab: Lab) -> Arrays:
    row, kept = lab.batch[:1].clone().requires_grad_(), []
    handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output: kept.append(output))
    lab.resnet(row)
    handle.remove()
    kept[0].norm().backward()
    return {"row": (row + RATE * row.grad / row.grad.abs().mean()).detach().numpy()}


def dissection_by_request(lab: Lab) -> Arrays:
    return {"iou": measure_overlap(lab.client.extract(lab.batch[:16], "layer3", model="resnet18")["layer3"])}


def dissection_by_script(lab: Lab) -> Arrays:
    kept: list[Array] = []
    handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output: kept.append(output.numpy()))
    with torch.no_grad():
        lab.resnet(lab.batch[:16])
    handle.remove()
    return {"iou": measure_overlap(kept[0])}


def measure_overlap(maps: Array) -> Array:
    """Intersection over union of each unit's strongest 5 % with a concept's pixels, here the left half."""
    concept = np.arange(maps.shape[3]) < maps.shape[3] // 2
    active = maps > np.quantile(maps, 0.95, axis=(0, 2, 3), keepdims=True)
    return (active & concept).sum((0, 2, 3)) / (active | concept).sum((0, 2, 3))
