"""Gradients that are no maps: of a style, of weights for each input, through time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torchvision.models.feature_extraction import create_feature_extractor

from bench.jobs.lab import STAGES, Array, Arrays, Lab

STYLES = STAGES[:3]
LINEAR = ["blocks.11.mlp.fc2", "head"]


def style_by_request(lab: Lab) -> Arrays:
    maps = lab.client.extract(lab.batch[:2], STYLES, model="resnet18")  # of the picture, and of the style
    pulls = [{"tensor": differentiate_style(*maps[name])} for name in STYLES]
    places = [{"layer": name, "site": "grad_output", "op": "add"} for name in STYLES]
    edits = [place | pull for place, pull in zip(places, pulls, strict=True)]
    edits[-1]["op"] = "replace"  # what the objective gives there
    objective = {"kind": "layer", "layer": STYLES[-1]}
    options = {"model": "resnet18", "objective": objective, "interventions": edits}
    return lab.client.extract(list(lab.batch[:1]), ".:grad_input", **options)


def style_by_script(lab: Lab) -> Arrays:
    extractor, row = create_feature_extractor(lab.resnet, STYLES), lab.batch[:1].clone().requires_grad_()
    with torch.no_grad():
        style = extractor(lab.batch[1:2])
    found = extractor(row)
    sum(((gram(found[name]) - gram(style[name])) ** 2).sum() for name in STYLES).backward()
    return {".:grad_input": row.grad.numpy()}


def gram(maps: Tensor) -> Tensor:
    """Products of channels, by their size."""
    flat = maps.flatten(2)
    return flat @ flat.mT / flat[0].numel()


def differentiate_style(maps: Array, style: Array) -> Array:
    """The gradient of the loss with respect to the maps of one picture."""
    one, two = torch.from_numpy(maps)[None], torch.from_numpy(style)[None]
    pulled = 4 * (gram(one) - gram(two)) @ one.flatten(2) / one.numel()
    return pulled.view_as(one)[0].numpy()


def sample_gradients_by_request(lab: Lab) -> Arrays:
    loss = {"kind": "cross_entropy", "class": 7}
    norms = [{"layer": f"{layer}[weight]:grad_weight", "stats": ["l2"], "as": layer} for layer in LINEAR]
    fishers = [{"layer": f"{layer}[weight]:grad_weight", "combine": "mean_square"} for layer in LINEAR]
    return lab.client.extract(lab.batch, norms + fishers, model="vit", objective=loss)


def sample_gradients_by_script(lab: Lab) -> Arrays:
    weights = {f"{layer}.weight": lab.vit.get_parameter(f"{layer}.weight").detach() for layer in LINEAR}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return cross_entropy(functional_call(lab.vit, weights, (row[None],)), torch.tensor([7]))

    found = vmap(grad(loss), in_dims=(None, 0))(weights, lab.batch)
    norms = {layer: found[f"{layer}.weight"].flatten(1).norm(dim=1, keepdim=True) for layer in LINEAR}
    fishers = {f"{layer}[weight]:grad_weight": found[f"{layer}.weight"].square().mean(0) for layer in LINEAR}
    return {name: value.numpy() for name, value in {**norms, **fishers}.items()}


def recurrent_by_request(lab: Lab) -> Arrays:
    found = lab.client.extract(lab.sequences, ["gru[0]", "lstm[0]", "cell#*"], model="recurrent")
    steps = np.stack([found[f"cell#{step}"] for step in range(lab.sequences.shape[1])], 1)
    return {"gru": found["gru[0]"], "lstm": found["lstm[0]"], "cell": steps}


def recurrent_by_script(lab: Lab) -> Arrays:
    kept: dict[nn.Module, list[Tensor]] = {module: [] for module in lab.recurrent.children()}
    handles = [
        module.register_forward_hook(lambda module, args, output: kept[module].append(output)) for module in kept
    ]
    with torch.no_grad():
        lab.recurrent(lab.sequences)
    for handle in handles:
        handle.remove()
    (gru,), (lstm,), cell, _ = kept.values()
    return {"gru": gru[0].numpy(), "lstm": lstm[0].numpy(), "cell": torch.stack(cell, 1).numpy()}
