"""Trains the guide's vision transformer: ``PYTHONPATH=. python examples/guide/train.py``; needs scikit-learn.

Epochs are fixed in advance and the last one's weights are kept; held-out digits are looked at once, after training.
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
EPOCHS, RATE = 40, 0.004


def train(make: Callable[[], nn.Module], split: Split) -> nn.Module:
    """A network trained on the split, in eval mode; deterministic for one machine and number of threads."""
    torch.manual_seed(SEED)
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    steps = EPOCHS * math.ceil(len(split.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
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
    """Train it, write its weights beside this file, and say how many held-out digits it recognises."""
    torch.set_num_threads(1)
    training, held_out = load_splits()
    network = train(networks.patches, training)
    save_file(network.state_dict(), Path(__file__).with_name("patches.safetensors"))
    print(f"{count_correct(network, held_out)} of {len(held_out.labels)} held-out digits")


if __name__ == "__main__":
    main()
