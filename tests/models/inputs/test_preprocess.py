"""The project's preprocessing against torchvision's and timm's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import create_transform, resolve_data_config
from torchvision.models import get_model_weights, list_models
from torchvision.transforms import functional as tvf

from layertap.models.inputs.geometry import compute_resized_size, find_seen_box
from layertap.models.inputs.preprocess import (
    compute_least_size,
    compute_output_size,
    from_timm,
    from_torchvision,
    preprocess,
)
from layertap.models.spec import PreprocessSpec


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


IMAGES = {
    "china": Image.fromarray(load_sample_image("china.jpg")),
    "301x199": noise(301, 199),
    "40x300": noise(40, 300),
    "10x10": noise(10, 10),
}
ENTRIES = [entry for name in list_models() for entry in get_model_weights(name)]
BY_SPEC = {spec: entry for entry in ENTRIES if (spec := from_torchvision(entry.transforms())) is not None}
TIMM = (
    "resnet50.a1_in1k",  # resize short side, 0.95
    "vit_base_patch16_224.augreg_in21k",  # mean and std 0.5
    "convnext_base.clip_laion2b_augreg_ft_in12k_in1k_384",  # squash, nothing cropped
    "dm_nfnet_f1.dm_in1k",  # squash, then crop
    "csatv2.r512_in1k",  # bilinear
    "mixer_b16_224.miil_in21k",  # mean 0, std 1
    "vit_base_patch14_dinov2.lvd142m",  # 518 pixels
)


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("spec", BY_SPEC, ids=[str(entry) for entry in BY_SPEC.values()])
def test_equals_torchvision_bit_for_bit(spec: PreprocessSpec, image: Image.Image) -> None:
    """Every distinct preset of torchvision's classification and segmentation weights gives the same bits here."""
    result = preprocess(image, spec)
    assert torch.equal(result, BY_SPEC[spec].transforms()(image))
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert compute_output_size(spec) in (None, tuple(result.shape[1:]))


def test_presets_differ_enough_to_prove_something() -> None:
    """The presets tried hold several interpolations, crops of their own, and one without a crop."""
    assert len(BY_SPEC) >= 25
    assert {spec.interpolation for spec in BY_SPEC} == {"bilinear", "bicubic"}
    assert {224, 299, 518, None} <= {spec.crop for spec in BY_SPEC}


def test_every_image_preset_is_converted_and_no_other() -> None:
    """Classification and segmentation weights give a spec, video, detection and optical flow give None."""
    offered = {"ImageClassification", "SemanticSegmentation"}
    for entry in ENTRIES:
        preset = entry.transforms()
        assert (from_torchvision(preset) is not None) == (type(preset).__name__ in offered), entry


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("name", TIMM)
def test_equals_timm_bit_for_bit(name: str, image: Image.Image) -> None:
    """The spec of a timm model's configuration gives the numbers of timm's own evaluation transform."""
    config = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    spec = from_timm(config)
    assert spec is not None
    assert torch.equal(preprocess(image, spec), create_transform(**config, is_training=False)(image))


@pytest.mark.parametrize(
    "change",
    [
        {"crop_mode": "border"},
        {"input_size": (3, 224, 256)},
        {"input_size": (1, 224, 224)},
        {"interpolation": "random"},
    ],
    ids=["border", "not square", "one channel", "random"],
)
def test_timm_transform_that_a_spec_cannot_say(change: dict[str, object]) -> None:
    """A timm transform with steps that a PreprocessSpec has no words for gives None, never an approximation."""
    config = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg("resnet18").to_dict())
    assert from_timm(config) is not None
    assert from_timm(config | change) is None


@pytest.mark.parametrize(
    "interpolation", ["nearest", "nearest-exact", "bilinear", "bicubic", "lanczos", "box", "hamming"]
)
def test_every_interpolation_is_pillows(interpolation: str) -> None:
    """Each interpolation that a spec may name resizes as torchvision does on a PIL image."""
    spec = PreprocessSpec(resize=(20, 30), mean=(0, 0, 0), std=(1, 1, 1), interpolation=interpolation)  # type: ignore[arg-type]
    resized = tvf.resize(IMAGES["301x199"], [20, 30], tvf.InterpolationMode(interpolation))
    assert torch.equal(preprocess(IMAGES["301x199"], spec), tvf.to_tensor(resized))


def test_no_steps_only_scale() -> None:
    """Without resize and crop, with mean 0 and std 1, the result is the image on the 0…1 scale."""
    spec = PreprocessSpec(mean=(0, 0, 0), std=(1, 1, 1))
    assert torch.equal(preprocess(IMAGES["10x10"], spec), tvf.to_tensor(IMAGES["10x10"]))


@pytest.mark.parametrize("resize", [None, 7, 24, 64, (9, 30)])
@pytest.mark.parametrize("size", [(301, 199), (40, 300), (10, 10), (1, 500), (500, 3)])
def test_resized_size_is_known_beforehand(resize: int | tuple[int, int] | None, size: tuple[int, int]) -> None:
    """The width and height said beforehand are those of the image the resize step makes."""
    spec = PreprocessSpec(resize=resize)
    assert compute_resized_size(spec, *size) == tuple(preprocess(noise(*size), spec).shape[:0:-1])


def test_thin_image_is_known_to_grow() -> None:
    """A 1 x 20000 image is known to become a thousand million pixels if its short side were resized."""
    assert compute_resized_size(PreprocessSpec(resize=256), 1, 20_000) == (256, 256 * 20_000)


@pytest.mark.parametrize("size", [(64, 48), (48, 64), (50, 50)])
@pytest.mark.parametrize(
    "spec",
    [PreprocessSpec(resize=32, crop=24), PreprocessSpec(crop=(20, 30)), PreprocessSpec(resize=(40, 20), crop=16)],
)
def test_seen_box(spec: PreprocessSpec, size: tuple[int, int]) -> None:
    """The part of a picture that the model sees is the only one whose pixels change the row."""
    plain = replace(spec, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="nearest")
    left, upper, right, lower = find_seen_box(plain, *size)
    outside = Image.new("RGB", size, (255, 255, 255))
    outside.paste((0, 0, 0), (round(left), round(upper), round(right), round(lower)))
    row = preprocess(outside, plain)
    assert row[:, 1:-1, 1:-1].max() == 0  # at the edge a pixel lies on both sides
    shifted = Image.new("RGB", size, (255, 255, 255))
    shifted.paste((0, 0, 0), (round(left) + 3, round(upper) + 3, round(right) + 3, round(lower) + 3))
    assert preprocess(shifted, plain)[:, 1:-1, 1:-1].max() == 1


@pytest.mark.parametrize(
    ("how", "least"),
    [
        ({"resize": 256}, (682, 512)),
        ({"resize": (100, 300)}, (600, 200)),
        ({"resize": 256, "crop": 224, "interpolation": "bicubic"}, (682, 512)),
        ({"resize": None, "crop": 224}, None),
        ({"resize": 256, "interpolation": "nearest"}, None),
        ({"resize": 256, "interpolation": "nearest-exact"}, None),
        ({"resize": 256, "interpolation": "box"}, None),
    ],
)
def test_enough(how: dict[str, Any], least: tuple[int, int] | None) -> None:
    """A picture may be decoded at twice what it is resized to; in full where it is not resized smoothly."""
    assert compute_least_size(PreprocessSpec(**how), 4000, 3000) == least
