"""Ten jobs of people who look inside models, by request and by script: ``python -m bench.jobs [--json FILE]``.

A ResNet-18 and a GPT-2 of six layers with seeded weights, on a server of this machine and in this process. Of each job:
the lines of the request and of the script with plain hooks, seconds of both (the median of some rounds, in turn), and
the largest difference of their results, by the largest value.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.models.feature_extraction import create_feature_extractor
from transformers import GPT2Config, GPT2LMHeadModel

from bench.client import start_server
from bench.machine import described
from layertap_client import Client

Arrays = dict[str, NDArray[Any]]
FIVE = ["conv1", "layer1", "layer2", "layer3", "layer4"]
BLOCKS = [f"transformer.h.{number}" for number in range(6)]
VOCABULARY, WIDTH, FEATURES, CHUNK = 5000, 768, 2048, 64


@dataclass(frozen=True)
class Lab:
    """The models, the server that has them too, and what is looked at."""

    client: Client
    resnet: Any
    other: Any
    gpt2: Any
    folder: Path  # of pictures
    batch: NDArray[Any]
    texts: list[list[int]]
    sae: dict[str, Tensor]  # and a vector to steer by


def probe_by_request(lab: Lab) -> Arrays:
    return dict(lab.client.extract(lab.batch, FIVE, model="resnet18", pool="mean"))


def probe_by_script(lab: Lab) -> Arrays:
    extractor = create_feature_extractor(lab.resnet, FIVE)
    with torch.no_grad():
        return {name: value.mean((2, 3)).numpy() for name, value in extractor(torch.from_numpy(lab.batch)).items()}


def atlas_by_request(lab: Lab) -> Arrays:
    options = ["--layers", "layer4", "--reduce", "stats,top", "--model", "resnet18", "--restart"]
    options += ["--config", str(lab.folder / "models.yaml"), "--out", str(lab.folder / "atlas")]
    command = [sys.executable, "-m", "layertap", "bulk", str(lab.folder / "pictures"), *options]
    subprocess.run(command, check=True, capture_output=True)
    found = np.load(lab.folder / "atlas" / "reductions.npz")
    return {"mean": found["layer4.mean"], "max": found["layer4.max"], "top": found["layer4.top"]}


def atlas_by_script(lab: Lab) -> Arrays:
    read = ResNet18_Weights.IMAGENET1K_V1.transforms()
    extractor = create_feature_extractor(lab.resnet, ["layer4"])
    files = sorted((lab.folder / "pictures").iterdir())
    total, strongest = torch.zeros(512, dtype=torch.float64), []
    for start in range(0, len(files), 32):
        rows = torch.stack([read(Image.open(file)) for file in files[start : start + 32]])
        with torch.no_grad():
            values = extractor(rows)["layer4"]
        total += values.double().sum((0, 2, 3))
        strongest.append(values.amax((2, 3)))
    top = torch.cat(strongest).topk(9, dim=0).values.T
    return {"mean": (total / len(files) / 49).numpy(), "max": top[:, 0].numpy(), "top": top.numpy()}


def ablation_by_request(lab: Lab) -> Arrays:
    found = lab.client.sweep(lab.batch[:1], "layer3", "zero", each="channel", objective={"class": 3}, model="resnet18")
    return {"layer3": found["layer3"]}


def ablation_by_script(lab: Lab) -> Arrays:
    found = np.empty((1, 256), np.float32)
    for row, picture in enumerate(torch.from_numpy(lab.batch[:1])):
        for start in range(0, 256, CHUNK):
            kept = torch.ones(CHUNK, 256, 1, 1)
            kept[range(CHUNK), range(start, start + CHUNK)] = 0
            handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output, kept=kept: output * kept)
            with torch.no_grad():
                found[row, start : start + CHUNK] = lab.resnet(picture.expand(CHUNK, 3, 224, 224))[:, 3]
            handle.remove()
    return {"layer3": found}


def steering_by_request(lab: Lab) -> Arrays:
    change = {"layer": BLOCKS[3], "op": "add", "tensor": lab.sae["vector"].numpy()}
    inputs = [{"tokens": text} for text in lab.texts]
    last = {"layer": "lm_head", "tokens": [-1]}
    return {"logits": lab.client.extract(inputs, last, model="gpt2", interventions=[change])["lm_head"][:, 0]}


def steering_by_script(lab: Lab) -> Arrays:
    handle = lab.gpt2.transformer.h[3].register_forward_hook(lambda module, args, output: output + lab.sae["vector"])
    with torch.no_grad():
        logits = [lab.gpt2(torch.tensor([text])).logits[0, -1] for text in lab.texts]
    handle.remove()
    return {"logits": torch.stack(logits).numpy()}


def neuron_by_request(lab: Lab) -> Arrays:
    neuron = {"kind": "layer", "layer": "layer3", "channel": 5, "position": [7, 7]}
    return dict(lab.client.extract(lab.batch[:8], ".:grad_input", model="resnet18", objective=neuron))


def neuron_by_script(lab: Lab) -> Arrays:
    rows, saved = torch.from_numpy(lab.batch[:8]).requires_grad_(), []
    handle = lab.resnet.layer3.register_forward_hook(lambda module, args, output: saved.append(output))
    lab.resnet(rows)
    handle.remove()
    (gradient,) = torch.autograd.grad(saved[0][:, 5, 7, 7].sum(), rows)
    return {".:grad_input": gradient.numpy()}


def cka_by_request(lab: Lab) -> Arrays:
    one, two = (lab.client.extract(lab.batch, FIVE, model=name, pool="mean") for name in ("resnet18", "other"))
    return {"cka": np.array([[compute_cka(one[a], two[b]) for b in FIVE] for a in FIVE])}


def cka_by_script(lab: Lab) -> Arrays:
    rows, found = torch.from_numpy(lab.batch), []
    for model in (lab.resnet, lab.other):
        extractor = create_feature_extractor(model, FIVE)
        with torch.no_grad():
            found.append({name: value.mean((2, 3)).numpy() for name, value in extractor(rows).items()})
    return {"cka": np.array([[compute_cka(found[0][a], found[1][b]) for b in FIVE] for a in FIVE])}


def compute_cka(one: NDArray[Any], two: NDArray[Any]) -> float:
    """Linear CKA of features (rows, channels), whose products are rows by rows."""
    one, two = (each.astype(np.float64) - each.mean(0, dtype=np.float64) for each in (one, two))
    products = np.linalg.norm(one @ one.T), np.linalg.norm(two @ two.T)
    return float(np.linalg.norm(one.T @ two) ** 2 / (products[0] * products[1]))


def entropy_by_request(lab: Lab) -> Arrays:
    asked = {"layer": "*:attention", "stats": ["entropy"], "by": "head"}
    found = lab.client.extract([{"tokens": text} for text in lab.texts], asked, model="gpt2")
    return {"entropy": np.stack(list(found.values()), 1)[..., 0]}


def entropy_by_script(lab: Lab) -> Arrays:
    found = []
    for text in lab.texts:
        with torch.no_grad():
            layers = torch.stack(lab.gpt2(torch.tensor([text]), output_attentions=True).attentions)[:, 0]
        found.append(torch.special.entr(layers).sum(-1).mean(-1))
    return {"entropy": torch.stack(found).numpy()}


def patching_by_request(lab: Lab) -> Arrays:
    clean, corrupt = lab.texts[0], [*lab.texts[0][:3], 7, *lab.texts[0][4:]]
    metric = {"terms": [[1, 11], [-1, 13]], "position": -1}
    inputs = [{"tokens": clean}, {"tokens": corrupt}]
    found = lab.client.sweep(inputs, BLOCKS, "replace", each="token", source=0, objective=metric, model="gpt2")
    return {"effects": np.stack([found[name][1] for name in BLOCKS])}


def patching_by_script(lab: Lab) -> Arrays:
    clean, corrupt = lab.texts[0], [*lab.texts[0][:3], 7, *lab.texts[0][4:]]
    taken: dict[int, Tensor] = {}
    blocks = lab.gpt2.transformer.h
    handles = [
        block.register_forward_hook(lambda module, args, output, number=number: taken.update({number: output}))
        for number, block in enumerate(blocks)
    ]
    with torch.no_grad():
        lab.gpt2(torch.tensor([clean]))
    for handle in handles:
        handle.remove()
    found = np.empty((len(blocks), len(clean)), np.float32)
    for number, block in enumerate(blocks):

        def patch(module: Any, args: Any, output: Tensor, number: int = number) -> Tensor:
            output = output.clone()
            for row in range(len(clean)):
                output[row, row] = taken[number][0, row]
            return output

        handle = block.register_forward_hook(patch)
        with torch.no_grad():
            logits = lab.gpt2(torch.tensor([corrupt] * len(clean))).logits[:, -1]
        handle.remove()
        found[number] = logits[:, 11] - logits[:, 13]
    return {"effects": found}


def sae_by_request(lab: Lab) -> Arrays:
    encode = {"weight": lab.sae["encode"].numpy(), "bias": lab.sae["bias"].numpy(), "relu": True}
    steps = [encode, {"weight": lab.sae["decode"].numpy()}]
    change = {"layer": BLOCKS[3], "op": "replace", "project": steps}
    found = lab.client.extract({"tokens": lab.texts[0]}, "lm_head", model="gpt2", interventions=[change])
    return {"logits": found["lm_head"][0]}


def sae_by_script(lab: Lab) -> Arrays:
    def reconstruct(module: Any, args: Any, output: Tensor) -> Tensor:
        features = (output @ lab.sae["encode"].T + lab.sae["bias"]).relu()
        return features @ lab.sae["decode"].T

    handle = lab.gpt2.transformer.h[3].register_forward_hook(reconstruct)
    with torch.no_grad():
        logits = lab.gpt2(torch.tensor([lab.texts[0]])).logits[0]
    handle.remove()
    return {"logits": logits.numpy()}


def difference_by_request(lab: Lab) -> Arrays:
    metric = {"terms": [[1, 11], [-1, 13]], "position": -1}
    layers = [f"{name}:grad_output" for name in BLOCKS]
    found = lab.client.extract({"tokens": lab.texts[0]}, layers, model="gpt2", objective=metric)
    return {"gradients": np.concatenate([found[name] for name in layers])}


def difference_by_script(lab: Lab) -> Arrays:
    taken: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda module, args, output: taken.append(output))
        for block in lab.gpt2.transformer.h
    ]
    embedded = lab.gpt2.transformer.wte(torch.tensor([lab.texts[0]])).detach().requires_grad_()
    logits = lab.gpt2(inputs_embeds=embedded).logits[0, -1]
    for handle in handles:
        handle.remove()
    return {"gradients": torch.cat(torch.autograd.grad(logits[11] - logits[13], taken)).numpy()}


Run = Callable[[Lab], Arrays]
JOBS: dict[str, tuple[Run, Run]] = {
    "five layers' features for a linear probe, 48 pictures": (probe_by_request, probe_by_script),
    "each channel's mean, maximum and nine strongest pictures, 500 files": (atlas_by_request, atlas_by_script),
    "each of 256 channels ablated": (ablation_by_request, ablation_by_script),
    "texts of several lengths steered by a vector": (steering_by_request, steering_by_script),
    "a neuron's gradient and receptive field, 8 pictures": (neuron_by_request, neuron_by_script),
    "CKA between five layers of two models, 48 pictures": (cka_by_request, cka_by_script),
    "attention's entropy by head": (entropy_by_request, entropy_by_script),
    "patching, 6 layers by 12 tokens": (patching_by_request, patching_by_script),
    "an autoencoder's reconstruction put in, 2048 features": (sae_by_request, sae_by_script),
    "the gradient of a difference of logits": (difference_by_request, difference_by_script),
}


def count_lines(run: Run) -> int:
    """The lines of a job's body."""
    return len(inspect.getsource(run).splitlines()) - 1


def compare(found: Arrays, expected: Arrays) -> float:
    """The largest difference, by the largest value."""
    return max(float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in expected.items())


def make_models(folder: Path) -> dict[str, Any]:
    """The models with seeded weights, also as files and as a configuration of a server."""
    models: dict[str, Any] = {}
    entries = []
    for seed, name in enumerate(("resnet18", "other")):
        torch.manual_seed(seed)
        models[name] = resnet18().eval().requires_grad_(False)
        save_file(models[name].state_dict(), folder / f"{name}.safetensors")
        entries.append({"name": name, "source": "torchvision:resnet18", "weights": str(folder / f"{name}.safetensors")})
    config = GPT2Config(
        vocab_size=VOCABULARY, n_layer=6, n_embd=WIDTH, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    gpt2: Any = GPT2LMHeadModel(config)
    gpt2.set_attn_implementation("eager")  # the others return no attention
    models["gpt2"] = gpt2.eval().requires_grad_(False)
    gpt2.save_pretrained(folder / "gpt2")
    entries.append({"name": "gpt2", "source": f"transformers:{folder / 'gpt2'}"})
    (folder / "models.yaml").write_text(yaml.safe_dump({"models": entries}))
    return models


def make_pictures(folder: Path, count: int) -> None:
    """Pictures of smooth noise."""
    generator = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        small.resize((320, 256)).save(folder / f"{number:05}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder)
        (folder / "pictures").mkdir()
        make_pictures(folder / "pictures", 500)
        process, url = start_server("--config", str(folder / "models.yaml"))
        try:
            measured = measure(url, folder, models, options.rounds)
        finally:
            process.terminate()
            process.wait()
    table = Table("", "lines", "script's", "seconds", "script's", "difference", title=f"{os.cpu_count()} cores")
    for job, row in measured.items():
        seconds = [f"{median(each):.2f}" for each in (row["seconds"], row["script_seconds"])]
        table.add_row(job, str(row["lines"]), str(row["script_lines"]), *seconds, f"{row['difference']:.0e}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": described(), "jobs": measured}, indent=1))


def measure(url: str, folder: Path, models: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Lines, seconds and differences of each job."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (12, 7, 20)]
    batch = torch.randn(48, 3, 224, 224, generator=generator).numpy()
    sae = {"vector": torch.randn(WIDTH, generator=generator), "bias": torch.randn(FEATURES, generator=generator)}
    sae["encode"] = torch.randn(FEATURES, WIDTH, generator=generator) / WIDTH**0.5
    sae["decode"] = torch.randn(WIDTH, FEATURES, generator=generator) / FEATURES**0.5
    measured: dict[str, Any] = {}
    with Client(url, timeout=600) as client:
        lab = Lab(client, models["resnet18"], models["other"], models["gpt2"], folder, batch, texts, sae)
        for job, (request, script) in track(JOBS.items(), console=Console(stderr=True)):
            row: dict[str, Any] = {"lines": count_lines(request), "script_lines": count_lines(script)}
            row |= {"difference": compare(request(lab), script(lab)), "seconds": [], "script_seconds": []}
            for _ in range(rounds):
                for key, run in (("seconds", request), ("script_seconds", script)):
                    begun = time.perf_counter()
                    run(lab)
                    row[key].append(time.perf_counter() - begun)
            measured[job] = row
            sys.stderr.write(f"{job}: {row}\n")
    return measured


if __name__ == "__main__":
    main()
