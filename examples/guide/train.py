"""Trains the guide's two networks: ``PYTHONPATH=. python examples/guide/train.py``, three minutes; needs scikit-learn.

Epochs are fixed in advance and the last one's weights are kept; held-out digits are looked at once, after training.
``plain`` has no normalisation and a rate of learning that is too high for it: channels die, which is what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import networks
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from bench.digits import Split, augment, count_correct, load_splits

SEED = 0
BATCH = 64
RECIPES: dict[str, tuple[Callable[[], nn.Module], float, int]] = {  # what to train, rate of learning, epochs
    "plain": (networks.plain, 0.006, 45),
    "patches": (networks.patches, 0.004, 40),
}


def train(make: Callable[[], nn.Module], rate: float, epochs: int, split: Split) -> nn.Module:
    """A network trained on the split, in eval mode; deterministic for one machine and number of threads."""
    torch.manual_seed(SEED)
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    steps = epochs * math.ceil(len(split.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(split.labels))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            loss = functional.cross_entropy(network(augment(split.images[rows])), split.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def main() -> None:
    """Train both, write their weights beside this file, and say how many held-out digits each recognises."""
    torch.set_num_threads(1)
    training, held_out = load_splits()
    for name, (make, rate, epochs) in RECIPES.items():
        network = train(make, rate, epochs, training)
        save_file(network.state_dict(), Path(__file__).with_name(f"{name}.safetensors"))
        print(f"{name}: {count_correct(network, held_out)} of {len(held_out.labels)} held-out digits")


if __name__ == "__main__":
    main()
