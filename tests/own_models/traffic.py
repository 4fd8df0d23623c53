"""A day of traffic in small: four clients ask many models of one's own at once, each answer beside plain PyTorch.

``python -m tests.own_models.traffic --requests 10000``; ends with 1 if an answer was wrong, and counts other clients'.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.spec import InputSpec
from tests.own_models import paths_nets, rows_nets, state_nets
from tests.own_models.ask import Asker, own, serving_models

ROW, IDS, PICTURE = InputSpec("x", (8,)), InputSpec("ids", (6,), "int64", values=(0, 1000)), InputSpec("x", (3, 32, 32))
MODELS: dict[str, tuple[str, InputSpec, tuple[str, ...]]] = {
    **dict.fromkeys(("Flag", "Read", "Floor", "Late", "Many", "Gate"), ("rows_nets", ROW, (".",))),
    "Mixes": ("rows_nets", ROW, (".", "a")),
    "Sorted": ("rows_nets", IDS, (".", "table", "head")),
    **dict.fromkeys(
        (
            *("Seen", "Raises", "Swap", "Overwritten", "Slope", "Hooked", "Counted", "Dropped", "Helper", "Closed"),
            *("Latch", "Backwards"),
        ),
        ("state_nets", ROW, (".", "a", "b")),
    ),
    "Table": ("state_nets", PICTURE, (".", "stem", "head")),
    "Loop": ("paths_nets", ROW, (".", "block.0", "head")),
    "Halting": ("paths_nets", ROW, (".", "cell")),
    "Ways": ("paths_nets", ROW, (".", "head")),
}
SCALES = (1e-3, 1.0, 1.0, 100.0, 1e6)
CLIENTS = 4
LIMIT = 1e-4


@dataclass
class Client:
    """One client: its own numbers, and what it saw."""

    asker: Asker
    modules: dict[str, nn.Module]
    seed: int

    def run(self, requests: int) -> Counter[str]:
        """Ask so many times; counts outcomes by model."""
        draw, outcomes = random.Random(self.seed), Counter[str]()
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(requests):
            name = draw.choice(list(MODELS))
            _, spec, layers = MODELS[name]
            layer = draw.choice(layers)
            shape = draw.choice(((3, 32, 32), (3, 64, 32), (3, 32, 64))) if spec is PICTURE else spec.shape
            rows = [_make_row(spec, shape, draw, generator) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
            gradient = spec is ROW and name != "Read" and layer == "." and draw.random() < 0.1
            more: dict[str, Any] = {"objective": {"kind": "logit", "class": 1}} if gradient else {}
            key = ".:grad_input" if gradient else layer
            reply = self.asker.extract(name, rows, [key], **more)
            outcomes[f"{name} {reply.status}" if reply.status != 200 else "asked"] += 1
            if reply.status == 200:
                wanted = torch.cat([self.compute(name, row, layer, gradient=gradient) for row in rows]).float()
                if not _is_same(reply.features[key], wanted):
                    outcomes[f"wrong {name} {key}"] += 1
        return outcomes

    def compute(self, name: str, row: Tensor, layer: str, *, gradient: bool) -> Tensor:
        """What plain PyTorch gives of a new model and one row."""
        module, found = copy.deepcopy(self.modules[name]), list[Tensor]()
        if isinstance(module, state_nets.Two):
            module.prepare()  # no copy of a closure has variables of its own
            module.eval()
        part = module if layer == "." else module.get_submodule(layer)
        part.register_forward_hook(lambda part, args, output: found.append(output.clone()))
        if not gradient:
            with torch.no_grad(), suppress(ValueError):  # of one that raises behind the layer
                module(row[None])
            return found[-1]
        given = row[None].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(module(given)[0, 1], given)
        return wanted


def _make_row(spec: InputSpec, shape: tuple[int, ...], draw: random.Random, generator: torch.Generator) -> Tensor:
    if spec is IDS:
        ids = torch.randint(1, 1000, spec.shape, generator=generator)
        ids[draw.randint(1, 6) :] = 0
        return ids
    return torch.randn(shape, generator=generator) * draw.choice(SCALES)


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    rows = zip(found.flatten(1), wanted.flatten(1), strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=LIMIT * max(float(b.abs().amax()), 1e-6)) for a, b in rows)


def main() -> int:
    """Serve, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets = {"paths_nets": paths_nets, "rows_nets": rows_nets, "state_nets": state_nets}
    modules = {name: getattr(nets[room], name)().eval() for name, (room, *_) in MODELS.items()}
    specs = [own(room, name, spec) for name, (room, spec, _) in MODELS.items()]
    with serving_models(*specs, workers=options.workers, max_loaded_models=len(specs)) as asker:
        clients = [Client(asker, modules, seed) for seed in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            outcomes = sum(pool.map(lambda each: each.run(options.requests // CLIENTS), clients), Counter[str]())
        models = asker.client.get("/models").json()["models"]
    crossing = [each["name"] for each in models if "crossing_rows" in each]
    sys.stdout.write("".join(f"{count:6} {name}\n" for name, count in sorted(outcomes.items())))
    sys.stdout.write(f"found while serving: {', '.join(crossing) or 'none'}\n")
    return int(any(name.startswith("wrong") for name in outcomes))


if __name__ == "__main__":
    sys.exit(main())
