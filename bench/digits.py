"""Trains the digits model: ``python -m bench.digits``.

The number of epochs is fixed in advance and the last epoch's weights are kept: the held-out pictures are looked at
once, after training. Needs scikit-learn.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.digits import PREPROCESS, WEIGHTS
from layertap.models.digits.architecture import digits
from layertap.models.inputs.preprocess import preprocess
from layertap.models.sources.state_dict import digest_weights

SEED = 0
EPOCHS = 30
BATCH = 64
LEARNING_RATE = 5e-3
HELD_OUT = 0.25
CARD = WEIGHTS.with_name("CARD.md")


@dataclass(frozen=True)
class Split:
    """Pictures (N, 3, 32, 32), float32 and preprocessed, and their digits (N,), int64."""

    images: Tensor
    labels: Tensor


def make_picture(pixels: NDArray[np.float64]) -> Image.Image:
    """One of scikit-learn's arrays, (8, 8) with values 0…16, as an RGB image."""
    return Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).convert("RGB")


def load_splits() -> tuple[Split, Split]:
    """Training and held-out pictures, stratified by digit; the same on every call."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    rows = range(len(data.target))
    train, held_out = train_test_split(rows, test_size=HELD_OUT, stratify=data.target, random_state=SEED)
    images = torch.stack([preprocess(make_picture(pixels), PREPROCESS) for pixels in data.images])
    labels = torch.from_numpy(data.target).long()
    return Split(images[train], labels[train]), Split(images[held_out], labels[held_out])


def train(split: Split, epochs: int = EPOCHS) -> nn.Module:
    """A network trained on the split, in eval mode; deterministic for one machine and number of threads."""
    torch.manual_seed(SEED)
    model = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    steps = epochs * math.ceil(len(split.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for epoch in range(epochs):
        losses = []
        order = torch.randperm(len(split.labels))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            loss = functional.cross_entropy(model(augment(split.images[rows])), split.labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        sys.stdout.write(f"epoch {epoch + 1:2d} of {epochs}: loss {np.mean(losses):.4f}\n")
    return model.eval()


def augment(images: Tensor) -> Tensor:
    """Each picture turned by up to 10 degrees, scaled by up to a tenth and moved by up to two pixels."""
    count = len(images)
    angle = (torch.rand(count) * 2 - 1) * math.radians(10)
    scale = 1 + (torch.rand(count) * 2 - 1) / 10
    shift = (torch.rand(count, 2) * 2 - 1) * 4 / 32
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    turn = torch.stack([cosine, -sine, sine, cosine], dim=1).view(count, 2, 2)
    grid = functional.affine_grid(torch.cat([turn, shift[:, :, None]], dim=2), list(images.shape), align_corners=False)
    # Outside is filled with zeros, which after the shift by one is black.
    return functional.grid_sample(images + 1, grid, align_corners=False) - 1


@torch.inference_mode()
def count_correct(model: nn.Module, split: Split) -> int:
    """How many pictures of the split are recognised."""
    return int((model(split.images).argmax(1) == split.labels).sum())


def write_card(figures: dict[str, str]) -> None:
    """Put figures into the card's table, in the rows of the same name."""
    text = CARD.read_text(encoding="utf-8")
    for name, figure in figures.items():
        text = re.sub(rf"^\| {re.escape(name)} \|.*$", f"| {name} | {figure} |", text, flags=re.MULTILINE)
    CARD.write_text(text, encoding="utf-8")


def main() -> None:
    """Train, measure once on the held-out pictures, write the weights and the card's figures."""
    training, held_out = load_splits()
    model = train(training)
    hits, count = count_correct(model, held_out), len(held_out.labels)
    WEIGHTS.write_bytes(save(model.state_dict()))
    figures = {
        "Parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "Training pictures": f"{len(training.labels):,}",
        "Held-out pictures": f"{count:,}",
        "Held-out accuracy": f"{hits / count:.4f} ({hits} of {count})",
        "Weights digest": f"`{digest_weights(model)}`",
    }
    write_card(figures)
    sys.stdout.write(f"held-out accuracy {figures['Held-out accuracy']}\n")


if __name__ == "__main__":
    main()
