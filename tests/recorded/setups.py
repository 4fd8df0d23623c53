"""The servers that answers are recorded of, with what each is asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import yaml

from tests.recorded.cases import (
    connections,
    documents,
    errors,
    explanations,
    gradients,
    images,
    inputs,
    interventions,
    keys,
    limits,
    networks,
    reductions,
    replies,
    resuming,
    routes,
    selectors,
    texts,
)
from tests.recorded.request import Json, Request
from tests.recorded.text_model import write_text_model

NETS = Path(__file__).with_name("nets.py")
ROW = {"name": "x", "shape": [4]}
PICTURE = {"name": "image", "shape": [3, 32, 32]}
PREPROCESS = {"resize": 36, "crop": 32, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic"}


@dataclass(frozen=True)
class Setup:
    """One server: its settings, what it is asked, the key it asks for, and what writes its configuration, if any."""

    name: str
    requests: Callable[[], Iterable[Request]]
    settings: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    write: Callable[[Path], Path] | None = None


def _net(name: str, factory: str, *inputs: Json, **fields: object) -> Json:
    return {
        "name": name,
        "source": f"python:recorded_nets:{factory}",
        "weights": "random:0",
        "inputs": list(inputs or (ROW,)),
        **fields,
    }


MODELS = (
    _net("cnn", "Cnn", PICTURE, preprocess=PREPROCESS, embedding="conv2", warm=[{"layers": ["conv1"], "pool": "mean"}]),
    _net("overwriting", "Overwriting"),
    _net("vit", "Vit", PICTURE, preprocess=PREPROCESS, decode="fast"),
    _net("encoder", "Encoder", {"name": "x", "shape": [5, 8]}),
    _net("repeats", "Repeats"),
    _net("structured", "Structured"),
    _net("pair", "Pair", {"name": "numbers", "shape": [4]}, {"name": "kind", "shape": [], "dtype": "int64"}),
    _net("centred", "Centred"),
    _net("recurrent", "Recurrent", {"name": "x", "shape": [6, 4]}),
    _net("touchy", "Touchy"),
    _net("half", "Cnn", PICTURE, preprocess=PREPROCESS, dtype="bfloat16", memory_format="channels_last"),
    _net("lazy", "Cnn", PICTURE, preprocess=PREPROCESS, load="lazy"),
    _net("broken", "Broken", required=False),
    {"name": "resnet18", "source": "torchvision:resnet18", "weights": "random:0"},
    {"name": "timm-vit", "source": "timm:vit_tiny_patch16_224", "weights": "random:0"},
    {"name": "bert", "source": "transformers:bert", "weights": "random:0"},
)


def write_nets(folder: Path) -> Path:
    """Write the configuration of all models but ``digits``, and what it names."""
    shutil.copy(NETS, folder / "recorded_nets.py")
    write_text_model(folder / "bert")
    models = [{"device": "cpu", "load": "startup", **model} for model in MODELS]
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump({"models": models, "defaults": {"model": "cnn"}}, sort_keys=False), "utf-8")
    return config


def _chain(*modules: Callable[[], Iterable[Request]]) -> Callable[[], Iterable[Request]]:
    return lambda: chain.from_iterable(module() for module in modules)


SETUPS = (
    Setup(
        "digits",
        _chain(
            inputs.requests,
            images.requests,
            reductions.requests,
            replies.requests,
            selectors.requests,
            interventions.requests,
            gradients.requests,
            explanations.requests,
            resuming.requests,
            errors.requests,
            documents.requests,
            routes.requests,
            connections.requests,
        ),
    ),
    Setup("nets", _chain(networks.requests, texts.requests), write=write_nets),
    Setup("limits", limits.requests, limits.SETTINGS),
    Setup("keys", keys.requests, keys.SETTINGS, keys.HEADERS),
)
COMMANDS = (("layers", "digits"), ("extract", "examples/digit.png", "--layers", "pool,head"))
