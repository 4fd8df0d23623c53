"""The work itself, without a server: ``python -m bench.profile.alone --model resnet50 --rows 8``.

CPU milliseconds an image, in one thread: of decoding and preprocessing as the service does them, and of a forward of so
many rows with a hook that copies. Prints one line of JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.serving.plain import SEED, arguments, read, seeded
from layertap.models.inputs.preprocess import preprocess
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from layertap.service.allocator import keep_large_blocks
from layertap.service.inputs.images import decode_image

LIMIT = 10**8  # pixels


def cpu_ms(work: Callable[[], object], images: int, seconds: float) -> float:
    """The median over as many turns as fit into the time."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not taken:
        begun = time.thread_time()
        work()
        taken.append(1000 * (time.thread_time() - begun) / images)
    return median(taken)


def keep(output: Tensor) -> None:
    """Have it made, and let it go."""


def main() -> None:
    """Measure, print."""
    parser = arguments("Decoding, preprocessing and forwards alone.")
    parser.add_argument("--rows", type=int, default=8)
    chosen = parser.parse_args()
    keep_large_blocks()  # as the server does
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pictures = read(chosen.pictures, Path(folder))
    how = build_model(ModelSpec(chosen.model, f"torchvision:{chosen.model}", weights=f"random:{SEED}")).preprocess
    forward = seeded(chosen.model)
    for layer in chosen.layers:
        forward.get_submodule(layer).register_forward_hook(lambda module, inputs, output: keep(output.clone()))
    batch = torch.randn(chosen.rows, 3, 224, 224)
    with torch.inference_mode():
        found = {
            "forwards": cpu_ms(lambda: forward(batch), chosen.rows, chosen.seconds / 2),
            "decoding": cpu_ms(
                lambda: [preprocess(decode_image(data, LIMIT).image, how) for data in pictures],
                len(pictures),
                chosen.seconds / 2,
            ),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
