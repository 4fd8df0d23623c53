"""The models of the simulation: what their forwards, their pictures and their requests take."""

from __future__ import annotations

from dataclasses import dataclass

from layertap.models.catalog.catalog import Costs


@dataclass(frozen=True)
class SimulatedModel:
    """``costs`` of a forward on one core, ``decode`` seconds of a picture.

    ``receive`` and ``reply``: seconds of the event loop for a request and for its answer.
    """

    costs: Costs
    decode: float
    receive: float = 0.9e-3
    reply: float = 0.7e-3


# About what one core of a quiet machine takes. MobileNetV3-small's fixed part is the one with which forwards have as
# many rows as those of a real server at 16 connections: mostly one, the others 15.
MOBILENET = Costs(base=5e-3, per_row=3.3e-3)
MODELS = {
    "mobilenet": SimulatedModel(MOBILENET, decode=3.6e-3),
    "mobilenet, small fixed part": SimulatedModel(Costs(base=2e-3, per_row=4e-3), decode=3.6e-3),
    "mobilenet, slow decoding": SimulatedModel(MOBILENET, decode=12e-3),
    "mobilenet, quick decoding": SimulatedModel(MOBILENET, decode=1e-3),
    "mobilenet, quick event loop": SimulatedModel(MOBILENET, decode=3.6e-3, receive=0.4e-3, reply=0.3e-3),
    "resnet50": SimulatedModel(Costs(base=4e-3, per_row=33e-3, speedup=1.5), decode=3.6e-3),
    "vit_b_16": SimulatedModel(Costs(base=8e-3, per_row=105e-3, speedup=1.6), decode=3.6e-3),
    "digits": SimulatedModel(Costs(base=0.5e-3, per_row=0.5e-3), decode=0.4e-3),
}
