"""Overlays of ``/explain`` against those that captum draws of its own attributions, on equal weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from captum.attr import GuidedBackprop, LayerAttribution, LayerGradCam, Occlusion, Saliency
from captum.attr import visualization as captum_visualization
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import configured, raw
from tests.service.test_explain_methods import module_of
from tests.service.test_pictures import find_near, read

Array = np.ndarray[Any, Any]
SIDE, DRAWN = 32, 288
CLASS = 2
STD = 0.01


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Live]:
    """A server of a small network that takes pictures as they are."""
    spec = ModelSpec(
        "cnn",
        "python:tests.service.nets_http:Cnn",
        weights="random:5",
        inputs=(InputSpec("x", (3, SIDE, SIDE)),),
        preprocess=PreprocessSpec(resize=(SIDE, SIDE), mean=(0.0,) * 3, std=(STD,) * 3),
    )
    with serve(configured(spec)) as live:
        yield live


@pytest.fixture(scope="module")
def pixels() -> Array:
    """A picture all but black, in which what is laid over it is what is bright; the model scales it up."""
    random = np.random.default_rng(11)
    smooth = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    return (np.asarray(smooth) // 32).astype(np.uint8)


def grad_cam(module: nn.Module, x: Tensor) -> Tensor:
    """Captum's, as large as it is drawn."""
    layer: Any = module.features
    small = LayerGradCam(module, layer).attribute(x, target=CLASS, relu_attributions=True)
    large: Tensor = LayerAttribution.interpolate(small, (DRAWN, DRAWN), "bilinear")
    return large


def saliency(module: nn.Module, x: Tensor) -> Tensor:
    """Captum's, the largest of the channels."""
    return Saliency(module).attribute(x, target=CLASS).amax(1, keepdim=True)


def occlusion(module: nn.Module, x: Tensor) -> Tensor:
    """Captum's: the same for each channel."""
    return Occlusion(module).attribute(x, (3, 8, 8), (3, 4, 4), baselines=0, target=CLASS)[:, :1]


def guided(module: nn.Module, x: Tensor) -> Tensor:
    """Captum's, over all channels."""
    return GuidedBackprop(module).attribute(x, target=CLASS).sum(1, keepdim=True)


METHODS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad_cam": grad_cam,
    "saliency": saliency,
    "occlusion": occlusion,
    "guided_backpropagation": guided,
}
OPTIONS = {"grad_cam": {"layer": "features"}, "occlusion": {"window": "8", "stride": "4"}}


def draw_captum(attribution: Tensor, pixels: Array, signed: bool) -> Array:
    """Captum's overlay in ``DRAWN`` pixels a side, (H, W, 3)."""
    large = LayerAttribution.interpolate(attribution, (DRAWN, DRAWN), "bilinear")
    shown = np.asarray(Image.fromarray(pixels).resize((DRAWN, DRAWN), Image.Resampling.NEAREST))
    with mpl.rc_context({"figure.dpi": 100}):
        figure, axes = captum_visualization.visualize_image_attr(
            np.moveaxis(large[0].numpy(), 0, -1),
            shown,
            method="blended_heat_map",
            sign="all" if signed else "positive",
            cmap=None if signed else "gray",
            alpha_overlay=0.97,  # captum brings the picture to full contrast
            outlier_perc=1,
            fig_size=(DRAWN / 100, DRAWN / 100),
            use_pyplot=False,
        )
    axes.set_position((0, 0, 1, 1))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float64)
    assert drawn.shape == (DRAWN, DRAWN, 3)
    return drawn


def draw_ours(live: Live, method: str, pixels: Array) -> Array:
    """The overlay of a sheet: what stands beside the picture that was sent."""
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    query = {"model": "cnn", "method": method, "class": str(CLASS), "format": "png", **OPTIONS.get(method, {})}
    sheet = read(live.client.post("/explain", **raw(stream.getvalue(), "image/png", **query)))
    shown = np.asarray(Image.fromarray(pixels).resize((DRAWN, DRAWN), Image.Resampling.NEAREST), np.float64)
    top, left = find_near(sheet, shown)
    beside = left + DRAWN + 6
    return sheet[top : top + DRAWN, beside : beside + DRAWN].astype(np.float64)


def measure(drawn: Array, warm: int, cold: int) -> Array:
    """How far a signed overlay goes to its warm side: what one channel has more than another; grey has none."""
    difference: Array = drawn[..., warm] - drawn[..., cold]
    return difference


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")  # captum says so each time
@pytest.mark.parametrize("method", METHODS)
def test_coverage(served: Live, pixels: Array, method: str) -> None:
    """What is covered most, and in which order, is so in captum's overlay too; where it is turned over it is not."""
    module = module_of(served, "cnn")
    x = torch.from_numpy(np.moveaxis(pixels.astype(np.float32) / 255 / STD, -1, 0)[None].copy()).requires_grad_()
    attribution = METHODS[method](module, x).detach()
    signed = bool(attribution.min() < 0)
    theirs, ours = draw_captum(attribution, pixels, signed), draw_ours(served, method, pixels)
    if signed:  # captum's is green above zero and red below it, ours orange and blue
        found, wanted = measure(ours, 0, 2), measure(theirs, 1, 0)
    else:  # light where it is strong, on a dark picture
        found, wanted = ours.sum(-1), theirs.sum(-1)
    # In blocks of pixels: the two enlarge by other splines.
    found, wanted = (each.reshape(36, 8, 36, 8).mean((1, 3)) for each in (found, wanted))
    agreement = spearmanr(found.ravel(), wanted.ravel()).statistic
    assert agreement > 0.9
    for turned in (wanted[::-1], wanted[:, ::-1], wanted.T):
        assert spearmanr(found.ravel(), turned.ravel()).statistic < agreement - 0.2
    row, column = np.unravel_index(wanted.argmax(), wanted.shape)
    assert found[row, column] >= np.quantile(found, 0.97)
