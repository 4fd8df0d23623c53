"""The models of the simulation: what their forwards, their pictures and their requests take."""

from __future__ import annotations

from dataclasses import dataclass

from layertap.models.catalog.catalog import Costs


@dataclass(frozen=True)
class SimulatedModel:
    """``costs`` of a forward on one core, ``decode`` seconds of a picture.

    ``receive`` and ``reply``: seconds of the front for a request and for its answer. ``layer_bytes``: all layers of a
    picture.
    """

    costs: Costs
    decode: float
    receive: float = 0.55e-3
    reply: float = 0.4e-3
    layer_bytes: int = 25 * 10**6


# About what one core takes in bench/results/serving-2026-11-23.json: an image of MobileNetV3-small cost 14.0, 11.6, 9.2
# and 8.9 CPU-ms in forwards of 1, 1.9, 7.5 and 13 rows, of which the front took 0.9 to 1.0; ResNet-50's 90 in one of 4.
MOBILENET = Costs(base=5.6e-3, per_row=3.5e-3)
MODELS = {
    "mobilenet": SimulatedModel(MOBILENET, decode=4e-3),
    "mobilenet, small fixed part": SimulatedModel(Costs(base=2e-3, per_row=4e-3), decode=4e-3),
    "mobilenet, slow decoding": SimulatedModel(MOBILENET, decode=12e-3),
    "mobilenet, quick decoding": SimulatedModel(MOBILENET, decode=1e-3),
    "mobilenet, slow front": SimulatedModel(MOBILENET, decode=4e-3, receive=1.1e-3, reply=0.8e-3),
    "resnet50": SimulatedModel(Costs(base=12e-3, per_row=80e-3, speedup=1.5), decode=4e-3, layer_bytes=125 * 10**6),
    "vit_b_16": SimulatedModel(Costs(base=40e-3, per_row=230e-3, speedup=1.6), decode=4e-3, layer_bytes=90 * 10**6),
    "digits": SimulatedModel(Costs(base=0.5e-3, per_row=0.5e-3), decode=0.4e-3, layer_bytes=10**5),
}
