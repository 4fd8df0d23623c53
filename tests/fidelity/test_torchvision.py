"""Architectures of torchvision: every module, every call, what goes in and what comes out, dictionaries and clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.cases import classifiers, parameter, torchvision_case
from tests.fidelity.client import post_json
from tests.fidelity.compare import Tally
from tests.fidelity.conftest import Noted
from tests.fidelity.nets import SMALL_CLIP, mvit_small
from tests.fidelity.served_model import Case, served_model
from tests.service.support import arrays_of, tensor


@pytest.mark.parametrize("case", classifiers())
def test_every_tensor(case: Case, tmp_path: Path, noted: Noted) -> None:
    """What comes over HTTP is what hooks with immediate copies saw offline: all of it, nothing else."""
    with served_model(case, tmp_path) as host:
        noted(host.check())


SCENE = (3, 64, 48)
CLIP = (3, 4, 32, 24)
NO_DOWNLOAD = {"weights_backbone": None}
SCENES = [
    parameter(torchvision_case(name, SCENE, **NO_DOWNLOAD, **options), level)
    for name, options, level in (
        ("deeplabv3_mobilenet_v3_large", {"aux_loss": True}, "slow"),
        ("deeplabv3_resnet50", {}, "hard"),
        ("deeplabv3_resnet101", {"aux_loss": True}, "hard"),
        ("fcn_resnet50", {"aux_loss": True}, "hard"),
        ("fcn_resnet101", {}, "hard"),
        ("lraspp_mobilenet_v3_large", {}, "hard"),
    )
]
CLIPS = [
    parameter(torchvision_case(name, shape), level)
    for name, shape, level in (
        ("r3d_18", CLIP, "hard"),
        ("mc3_18", CLIP, "hard"),
        ("r2plus1d_18", CLIP, "hard"),
        ("swin3d_t", (3, 4, 64, 48), "hard"),
        ("swin3d_s", (3, 4, 64, 48), "hard"),
        ("swin3d_b", (3, 4, 64, 48), "hard"),
    )
]
CLIPS.append(parameter(Case("python:tests.fidelity.nets:mvit_small", mvit_small, SMALL_CLIP), "slow"))


@pytest.mark.parametrize("case", SCENES)
def test_dictionaries(case: Case, tmp_path: Path, noted: Noted) -> None:
    """Every tensor in every dictionary that goes in or out anywhere; one can be asked for by its path."""
    with served_model(case, tmp_path) as host:
        noted(host.check(form="safetensors", reply="npz"))
        inner = next(key for key in host.wanted if key.startswith("backbone["))
        whole = "." if "." in host.wanted else ".[out]"
        body = {"model": host.name, "inputs": [tensor(row) for row in host.batch], "layers": [".[out]", inner]}
        found = arrays_of(post_json(host.live, body, format="npz"))
        assert found.keys() == {".[out]", inner}
        Tally().add(found, {".[out]": host.wanted[whole], inner: host.wanted[inner]})


@pytest.mark.parametrize("case", CLIPS)
def test_clips(case: Case, tmp_path: Path, noted: Noted) -> None:
    """Every tensor of a model of clips."""
    with served_model(case, tmp_path) as host:
        noted(host.check(form="safetensors", reply="npz"))
