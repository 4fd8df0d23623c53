"""Features of pictures: probes, similarities of models, what drives a channel, what is far from the rest."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch
from PIL import Image
from torchvision.models.feature_extraction import create_feature_extractor

from bench.jobs.lab import DEPTHS, STAGES, Array, Arrays, Lab


def features_by_request(lab: Lab) -> Arrays:
    return lab.client.extract(lab.batch, "layer?.?", model="resnet18", pool="mean")


def features_by_script(lab: Lab) -> Arrays:
    extractor = create_feature_extractor(lab.resnet, [f"{stage}.{block}" for stage in STAGES for block in (0, 1)])
    with torch.no_grad():
        found = extractor(lab.batch)
    return {name: value.mean((2, 3)).numpy() for name, value in found.items()}


def units_by_request(lab: Lab) -> Arrays:
    layers = [{"layer": stage, "sample": {"units": 500}} for stage in STAGES]
    return lab.client.extract(lab.batch, layers, model="resnet18")


def units_by_script(lab: Lab) -> Arrays:
    from torchextractor import Extractor

    extractor = Extractor(lab.resnet, STAGES)
    with torch.no_grad():
        _, found = extractor(lab.batch)
    for handle in extractor.hook_handles:
        handle.remove()
    flat = {name: value.flatten(1).numpy() for name, value in found.items()}
    return {name: value[:, choose_units(value)] for name, value in flat.items()}


def choose_units(value: Array) -> Array:
    """The indices of 500 units."""
    return np.random.default_rng(0).choice(value.shape[1], 500, replace=False)


def cka_by_request(lab: Lab) -> Arrays:
    other = {"model": "vit", "layers": DEPTHS, "pool": "mean"}
    return {"cka": lab.client.compare(lab.pictures[:32], STAGES, other, model="resnet18", pool="mean")["cka"]}


def cka_by_script(lab: Lab) -> Arrays:
    resnet, vit = create_feature_extractor(lab.resnet, STAGES), create_feature_extractor(lab.vit, DEPTHS)
    with torch.no_grad():
        maps = resnet(lab.open_pictures(32, lab.read_resnet))
        tokens = vit(lab.open_pictures(32, lab.read_vit))
    ones = {name: value.mean((2, 3)).numpy() for name, value in maps.items()}
    twos = {name: value[:, 1:].mean(1).numpy() for name, value in tokens.items()}
    return {"cka": np.array([[compute_cka(ones[one], twos[two]) for two in DEPTHS] for one in STAGES])}


def compute_cka(one: Array, two: Array) -> float:
    """Linear CKA of features (rows, channels), whose products are rows by rows."""
    one, two = (each.astype(np.float64) - each.mean(0, dtype=np.float64) for each in (one, two))
    products = np.linalg.norm(one @ one.T), np.linalg.norm(two @ two.T)
    return float(np.linalg.norm(one.T @ two) ** 2 / (products[0] * products[1]))


def pca_by_request(lab: Lab) -> Arrays:
    fitted = lab.client.extract(lab.batch, STAGES, model="resnet18", pool="mean")
    layers = [{"layer": name, "project": fit_components(fitted[name])} for name in STAGES]
    return lab.client.extract(list(lab.batch[:8]), layers, model="resnet18")


def pca_by_script(lab: Lab) -> Arrays:
    extractor, found = create_feature_extractor(lab.resnet, STAGES), {}
    with torch.no_grad():
        fitted, maps = extractor(lab.batch), extractor(lab.batch[:8])
    for name in STAGES:
        step = fit_components(fitted[name].mean((2, 3)).numpy())
        projected = np.einsum("kc,nchw->nkhw", step["weight"], maps[name].numpy())
        found[name] = projected + step["bias"][:, None, None]
    return found


def fit_components(features: Array) -> dict[str, Array]:
    """Four principal components of features (rows, channels) as a linear layer; largest entries are positive."""
    middle = features.mean(0)
    weight = np.linalg.svd(features - middle, full_matrices=False)[2][:4]
    weight *= np.sign(np.take_along_axis(weight, np.abs(weight).argmax(1, keepdims=True), 1))
    return {"weight": weight, "bias": -weight @ middle}


def atlas_by_request(lab: Lab) -> Arrays:
    options = ["--layers", "layer4", "--reduce", "stats,top", "--model", "resnet18", "--restart"]
    options += ["--url", lab.url, "--out", str(lab.folder / "atlas")]
    command = [sys.executable, "-m", "layertap", "bulk", str(lab.folder / "pictures"), *options]
    subprocess.run(command, check=True, capture_output=True)
    found = np.load(lab.folder / "atlas" / "reductions.npz")
    top, numbers = found["layer4.top"], found["layer4.top_inputs"]
    return {"mean": found["layer4.mean"], "top": top, "top_inputs": hide_ties(top, numbers)}


def atlas_by_script(lab: Lab) -> Arrays:
    extractor = create_feature_extractor(lab.resnet, ["layer4"])
    means, greatest = [], []
    for start in range(0, len(lab.pictures), 32):
        files = lab.pictures[start : start + 32]
        rows = torch.stack([lab.read_resnet(Image.open(file)) for file in files])
        with torch.no_grad():
            values = extractor(rows)["layer4"]
        means.append(values.double().mean((2, 3)))
        greatest.append(values.amax((2, 3)))
    top, numbers = (found.T.numpy() for found in torch.cat(greatest).topk(9, dim=0))
    return {"mean": torch.cat(means).mean(0).numpy(), "top": top, "top_inputs": hide_ties(top, numbers)}


def hide_ties(top: Array, numbers: Array) -> Array:
    """Pictures' numbers, -1 where others are as strong, as in channels that are 0 for most: their order is chance."""
    equal = np.pad(np.diff(top) == 0, ((0, 0), (1, 1)))
    return np.where(equal[:, 1:] | equal[:, :-1] | (top == 0), -1, numbers)
