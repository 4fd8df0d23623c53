"""What every peer is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Told:
    """A loopback port, a model of torchvision, the layers to answer with."""

    port: int
    model: str
    layers: tuple[str, ...]


def told() -> Told:
    """From the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="mobilenet_v3_small")
    parser.add_argument("--layers", nargs="+", default=["avgpool"])
    chosen = parser.parse_args()
    return Told(chosen.port, chosen.model, tuple(chosen.layers))
