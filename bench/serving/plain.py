"""What a reader of the PyTorch tutorial writes: a model, its preset's preprocessing, hooks that pool.

``python -m bench.serving.plain --model resnet50 --layers layer2 avgpool`` prints the first picture's vector of each
layer as JSON: what every contender has to answer.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights
from torchvision.models.feature_extraction import create_feature_extractor

from bench.serving.loads import LAYER
from bench.serving.pictures import written

SEED = 0
Features = dict[str, Tensor]
Forward = Callable[[Tensor], Features]


class Plain:
    """A model with seeded weights and the means of some layers, for any number of threads at once.

    By hooks; with ``cut`` as a model that ends behind the last of the layers, with ``graph`` compiled.
    """

    def __init__(
        self, name: str, layers: Sequence[str] = (LAYER,), *, cut: bool = False, graph: str | None = None
    ) -> None:
        """``graph`` is the pool of the warm plan whose graphs it runs."""
        self._prepare = preset(name)
        self._forward = compiled(name, layers, graph) if graph else (truncated if cut else hooked)(seeded(name), layers)

    def __call__(self, pictures: Iterable[bytes]) -> Features:
        """From JPEG bytes to each layer's mean over space, in one forward."""
        batch = torch.stack([self._prepare(decoded(data)) for data in pictures])
        with torch.inference_mode():
            return self._forward(batch)


def seeded(name: str) -> nn.Module:
    """A torchvision model with the weights that all contenders have."""
    torch.manual_seed(SEED)
    return get_model(name, weights=None).eval()


def preset(name: str) -> Callable[[Image.Image], Tensor]:
    """The preprocessing that torchvision has for a model."""
    prepare: Callable[[Image.Image], Tensor] = get_model_weights(name).DEFAULT.transforms()
    return prepare


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def compiled(name: str, layers: Sequence[str], pool: str) -> Forward:
    """A forward by the graphs of our server's warm plan."""
    from bench.serving.graph import GraphForward  # nothing of ours is in the memory of those who don't use it

    return GraphForward(name, layers, pool)


def truncated(model: nn.Module, layers: Sequence[str]) -> Forward:
    """A forward that ends behind the last of some layers and gives their means over space."""
    forward = create_feature_extractor(model, list(layers))
    return lambda batch: {layer: output.mean((2, 3)) for layer, output in forward(batch).items()}


def hooked(model: nn.Module, layers: Sequence[str]) -> Forward:
    """A forward that gives the means of layers over space, taken at once: the next layer may work in place."""
    kept = threading.local()

    def keeper(layer: str) -> Callable[[nn.Module, object, Tensor], None]:
        def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
            kept.outputs[layer] = output.mean((2, 3))

        return keep

    def forward(batch: Tensor) -> Features:
        kept.outputs = {}
        model(batch)
        outputs: Features = kept.outputs
        return outputs

    for layer in layers:
        model.get_submodule(layer).register_forward_hook(keeper(layer))
    return forward


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that the loop, the single images and the vectors share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="mobilenet_v3_small", help="a convolutional classifier of torchvision")
    parser.add_argument("--layers", nargs="+", default=[LAYER], metavar="LAYER")
    parser.add_argument("--cut", action="store_true", help="a model that ends behind the last of the layers")
    parser.add_argument("--graph", metavar="POOL", help="the graphs of a warm plan with this pool, in place of hooks")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pictures", type=Path, nargs="+", help="files; scikit-learn's two samples without it")
    return parser


def read(paths: list[Path] | None, folder: Path) -> list[bytes]:
    """The bytes of the pictures; the samples are made in the folder where none are named."""
    return [path.read_bytes() for path in paths or written(folder)]


def main() -> None:
    """One forward of the first picture."""
    chosen = arguments("The first picture's vectors.").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = read(chosen.pictures, Path(folder))
    found = Plain(chosen.model, chosen.layers, cut=chosen.cut, graph=chosen.graph)(pictures[:1])
    print(json.dumps({layer: rows[0].tolist() for layer, rows in found.items()}))


if __name__ == "__main__":
    main()
