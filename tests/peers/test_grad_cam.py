"""pytorch-grad-cam: maps of a class, before they are scaled for display."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.peers.conftest import PICTURES, Served, pictures

cams = pytest.importorskip("pytorch_grad_cam", reason="tests/peers/requirements.txt has it")
pytestmark = [pytest.mark.hard, pytest.mark.filterwarnings("ignore")]
METHODS = {
    "grad_cam": "GradCAM",
    "grad_cam_plusplus": "GradCAMPlusPlus",
    "hires_cam": "HiResCAM",
    "layer_cam": "LayerCAM",
    "xgrad_cam": "XGradCAM",
    "score_cam": "ScoreCAM",
}


# Score-CAM needs a forward for each channel: of few.
PAIRS = [
    (method, layer) for method in METHODS for layer in ("layer2", "layer4") if (method, layer[-1]) != ("score_cam", "4")
]


@pytest.mark.parametrize(("method", "layer"), PAIRS)
def test_map(served: Served, method: str, layer: str) -> None:
    """The map at the layer's own size, what speaks against the class cut off."""
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    module = copy.deepcopy(served.module("resnet")).requires_grad_()
    targets = [ClassifierOutputTarget(7)] * len(PICTURES)
    target = module.get_submodule(layer)
    with getattr(cams, METHODS[method])(model=module, target_layers=[target]) as cam:
        cam(input_tensor=PICTURES, targets=targets)
        seen: Any = cam.activations_and_grads
        values = seen.activations[0].detach().numpy()  # Score-CAM calls the model again
        gradients = seen.gradients[0].detach().numpy() if seen.gradients else None
        wanted = np.maximum(cam.get_cam_image(PICTURES, target, targets, values, gradients, False), 0)
    rule = {"rule": "pytorch-grad-cam"} if method == "grad_cam_plusplus" else {}  # its epsilon
    objective = {"kind": "logit", "class": 7}
    found = served.explain("resnet", pictures(), method=method, layer=layer, objective=objective, **rule)
    (found_map,) = found.values()
    assert wanted.max() > 0
    np.testing.assert_allclose(found_map, wanted, rtol=1e-3, atol=1e-5 * wanted.max())
