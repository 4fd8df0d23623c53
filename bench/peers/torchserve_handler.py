"""What a worker of TorchServe does with a batch."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.serving.plain import decoded, hooked, preset, seeded

Rows = list[dict[str, Any]]


@cache
def forward(model: str, layers: tuple[str, ...]) -> Callable[[Sequence[bytes]], Tensor]:
    """From JPEGs to the means of some layers' outputs over space, one after another in a vector each."""
    run, prepare = hooked(seeded(model), layers), preset(model)

    def vectors(pictures: Sequence[bytes]) -> Tensor:
        batch = torch.stack([prepare(decoded(data)) for data in pictures])
        with torch.inference_mode():
            means = run(batch)
        return torch.cat([means[layer] for layer in layers], 1)

    return vectors


def handle(rows: Rows | None, context: Any) -> list[bytes] | None:
    """An npy for each row; called without any when the worker starts."""
    if rows is None:
        torch.set_num_threads(1)
    settings = context.model_yaml_config["handler"]
    vectors = forward(settings["model"], tuple(settings["layers"]))
    if rows is None:
        return None
    for place in range(len(rows)):
        context.set_response_content_type(place, "application/x-npy")
    return [_npy(vector) for vector in vectors([bytes(row["body"]) for row in rows]).numpy()]


def _npy(vector: np.ndarray[Any, Any]) -> bytes:
    encoded = io.BytesIO()
    np.save(encoded, vector)
    return encoded.getvalue()
