"""The project's preprocessing against torchvision's and timm's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image
from timm.data import create_transform, resolve_data_config
from torchvision.models import get_model_weights, list_models
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvf

from layertap.models.inputs.device_decoder import DeviceDecoder, create_device_decoder, matches_cpu
from layertap.models.inputs.preprocess import (
    PILLOWS,
    LibraryProcessor,
    compute_least_size,
    make_row,
    normalize_batch,
    preprocess,
    preprocess_pixels,
)
from layertap.models.inputs.presets import from_timm, from_torchvision
from layertap.models.sources.timm import read_transform
from layertap.models.spec import FOR_TENSORS, Interpolation, ModelSpec, PreprocessSpec


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


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("spec", BY_SPEC, ids=[str(entry) for entry in BY_SPEC.values()])
def test_equals_torchvision_bit_for_bit(spec: PreprocessSpec, image: Image.Image) -> None:
    """Every distinct preset of torchvision's classification and segmentation weights gives the same bits here."""
    result = preprocess(image, spec)
    assert torch.equal(result, BY_SPEC[spec].transforms()(image))
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert spec.output_size in (None, tuple(result.shape[1:]))


def test_every_image_preset_is_converted_and_no_other() -> None:
    """Classification and segmentation weights give a spec, video, detection and optical flow give None."""
    offered = {"ImageClassification", "SemanticSegmentation"}
    for entry in ENTRIES:
        preset = entry.transforms()
        assert (from_torchvision(preset) is not None) == (type(preset).__name__ in offered), entry


TIMM = (
    "resnet50.a1_in1k",  # resize short side, 0.95
    "convnext_base.clip_laion2b_augreg_ft_in12k_in1k_384",  # squash, nothing cropped
    "dm_nfnet_f1.dm_in1k",  # squash, then crop
    "csatv2.r512_in1k",  # bilinear
)


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("name", TIMM)
def test_equals_timm_bit_for_bit(name: str, image: Image.Image) -> None:
    """The spec of a timm model's configuration gives the numbers of timm's own evaluation transform."""
    config = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    spec = from_timm(config)
    assert spec is not None
    assert torch.equal(preprocess(image, spec), create_transform(**config, is_training=False)(image))


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"crop_mode": "border"}, LibraryProcessor), ({"crop_mode": "border", "interpolation": "random"}, str)],
    ids=["border", "random"],
)
def test_timm_transform_that_a_spec_cannot_say(change: dict[str, object], kind: type) -> None:
    """A timm transform that no PreprocessSpec equals is used itself, or refused, never approximated."""
    config = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg("resnet18").to_dict())
    assert isinstance(read_transform(timm, config), PreprocessSpec)
    found = read_transform(timm, config | change)
    assert isinstance(found, kind)
    if isinstance(found, LibraryProcessor):
        transform = create_transform(**(config | change), is_training=False)
        assert all(torch.equal(found.make_row(image), transform(image)) for image in IMAGES.values())


PLAIN = PreprocessSpec(mean=(0.0,) * 3, std=(1.0,) * 3)


def test_other_channels() -> None:
    """One channel is Pillow's gray, and blue comes first where that is asked for."""
    image = IMAGES["301x199"]
    gray = preprocess(image, PreprocessSpec(resize=24, crop=20, mean=(0.5,), std=(0.25,), channels="gray"))
    wanted = tvf.center_crop(tvf.resize(image.convert("L"), 24), [20])
    assert torch.equal(gray, tvf.normalize(tvf.to_tensor(wanted), [0.5], [0.25]))
    assert torch.equal(preprocess(image, replace(PLAIN, channels="bgr")), tvf.to_tensor(image).flip(0))


@pytest.mark.parametrize("size", [(301, 199), (40, 300), (10, 10)])
@pytest.mark.parametrize("resize", [24, (31, 44)])
def test_letterbox(resize: int | tuple[int, int], size: tuple[int, int]) -> None:
    """The picture in a box, and a colour around it, as Pillow's ``ImageOps.pad`` does it."""
    spec = replace(PLAIN, resize=resize, letterbox=(114, 7, 200), interpolation="bicubic")
    box = (resize, resize) if isinstance(resize, int) else resize[::-1]
    wanted = ImageOps.pad(noise(*size), box, color=(114, 7, 200))
    assert torch.equal(preprocess(noise(*size), spec), tvf.to_tensor(wanted))
    assert spec.output_size == box[::-1]
    left, upper, right, lower = spec.find_seen_box(*size)
    assert max(left, upper) <= 0
    assert all(end >= side - 1 for end, side in zip((right, lower), size, strict=True))


@pytest.mark.parametrize(("scale", "ends"), [((-1.0, 1.0), (-1.0, 1.0)), ((0.0, 255.0), (0.0, 255.0))])
def test_scale(scale: tuple[float, float], ends: tuple[float, float]) -> None:
    """Black and white become the ends of the scale, on which mean and std are then."""
    image = Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8))
    assert preprocess(image, replace(PLAIN, scale=scale))[0, 0].tolist() == list(ends)
    moved = preprocess(image, replace(PLAIN, scale=scale, mean=(1.0, 2.0, 3.0), std=(2.0,) * 3))
    assert moved[1, 0].tolist() == [(end - 2) / 2 for end in ends]


@pytest.mark.parametrize("scale", [None, (0.0, 255.0)])
def test_a_batch_has_the_bits_of_its_rows(scale: tuple[float, float] | None) -> None:
    """Pixels that are normalised where the batch is: each row as if alone, the first one again as padding."""
    spec = replace(PLAIN, crop=24, scale=scale, mean=(0.48, 0.46, 0.41), std=(0.23, 0.22, 0.21))
    images = [IMAGES["china"], IMAGES["301x199"], IMAGES["40x300"]]
    pixels = [make_row(image, spec) for image in images]
    batch = normalize_batch([torch.stack(pixels[:2]), pixels[2][None]], spec, padding=2)
    rows = [preprocess(image, spec) for image in images]
    assert torch.equal(batch, torch.stack([*rows, rows[0], rows[0]]))
    assert batch.is_contiguous()
    assert all(each.dtype == torch.uint8 for each in pixels)


SIZES = [(640, 427), (64, 97), (224, 224), (225, 226), (33, 500), (500, 33), (40, 1), (9, 8)]
STEPS: list[tuple[Any, Any]] = [
    *((256, 224), (224, 224), (33, 32), (24, (20, 9)), (24, 25), (40, None)),
    *(((40, 60), (32, 50)), ((64, 64), 56), ((64, 64), None), ((70, 20), (70, 11))),
]


def by_torchvision(image: Image.Image, spec: PreprocessSpec) -> torch.Tensor:
    """The pixels of a row, by torchvision's transforms of PIL images: all of it resized, then cropped."""
    size = [spec.resize] if isinstance(spec.resize, int) else list(spec.resize or ())
    image = tvf.resize(image, size, tvf.InterpolationMode(spec.interpolation))
    if spec.crop is not None:
        image = tvf.center_crop(image, [spec.crop] if isinstance(spec.crop, int) else list(spec.crop))
    return tvf.pil_to_tensor(image)


def steps_apart(size: tuple[int, int], spec: PreprocessSpec, *, fast: bool) -> torch.Tensor:
    """How many 8-bit steps the pixels of noise, the hardest picture, are from torchvision's."""
    found, wanted = make_row(noise(*size), spec, fast=fast), by_torchvision(noise(*size), spec)
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    return (found.int() - wanted.int()).abs()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("interpolation", list(PILLOWS))
def test_only_the_crop_is_resized(size: tuple[int, int], interpolation: Interpolation) -> None:
    """Rows and columns that no crop keeps are left out; the bits are those of a whole picture, or, fast, nearly."""
    for resize, crop in STEPS:
        spec = replace(PLAIN, resize=resize, crop=crop, interpolation=interpolation)
        if max(spec.compute_resized_size(*size)) > 3000:
            continue
        assert steps_apart(size, spec, fast=False).max() == 0
        apart = steps_apart(size, spec, fast=True)
        assert apart.max() <= 2
        assert apart.float().mean() < 0.08


@pytest.mark.parametrize("more", [{"channels": "gray", "mean": (0.0,), "std": (1.0,)}, {"channels": "bgr"}])
def test_fast_channels(more: dict[str, Any]) -> None:
    """Gray levels and colours in another order are resized sooner too."""
    spec = replace(PLAIN, resize=64, crop=56, **more)
    apart = (make_row(IMAGES["china"], spec, fast=True).int() - make_row(IMAGES["china"], spec).int()).abs()
    assert apart.shape == (spec.channel_count, 56, 56)
    assert apart.max() == 1


def test_enough() -> None:
    """A picture may be decoded at twice what it is resized to; in full where it is not resized smoothly."""
    assert compute_least_size(PreprocessSpec(resize=256, crop=224), 4000, 3000) == (682, 512)
    assert compute_least_size(PreprocessSpec(crop=224), 4000, 3000) is None
    assert compute_least_size(PreprocessSpec(resize=256, interpolation="nearest"), 4000, 3000) is None


pytestmark = pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")  # torchvision names a successor
CPU = torch.device("cpu")
CHINA = Image.fromarray(load_sample_image("china.jpg"))
SMALL = PreprocessSpec(resize=64, crop=56, mean=(0, 0, 0), std=(1, 1, 1))
MOST = {"bilinear": (1, 0.2), "bicubic": (12, 0.2)}  # greatest and mean difference, in steps of 8 bits


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    stream = BytesIO()
    picture.save(stream, "JPEG", **{"quality": 95, **options})
    return stream.getvalue()


def by_pillow(picture: Image.Image, spec: PreprocessSpec) -> torch.Tensor:
    """The same steps by torchvision on a picture."""
    size, crop = ([side] if isinstance(side, int) else side for side in (spec.resize, spec.crop))
    resized = picture if size is None else tvf.resize(picture, list(size), InterpolationMode(spec.interpolation))
    cropped = resized if crop is None else tvf.center_crop(resized, list(crop))
    return tvf.normalize(tvf.to_tensor(cropped), spec.mean, spec.std)


@pytest.mark.parametrize("size", [(232, 224), (40, None), ((50, 90), (48, 80)), (None, 100)], ids=str)
@pytest.mark.parametrize("mode", sorted(FOR_TENSORS))
def test_near_to_pillow(mode: Interpolation, size: tuple[Any, Any]) -> None:
    """Each resampling and kind of size: values differ by rounding, and where Pillow cuts off what overshoots."""
    spec = PreprocessSpec(*size, mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2), interpolation=mode)
    found = preprocess_pixels(tvf.pil_to_tensor(CHINA), spec)
    wanted = by_pillow(CHINA, spec)
    assert (found.shape, found.dtype, found.is_contiguous()) == (wanted.shape, torch.float32, True)
    steps = (found - wanted).abs() * torch.tensor(spec.std).view(3, 1, 1) * 255
    most, mean = MOST[mode] if spec.resize is not None else (0, 0)
    assert steps.max() <= most + 1e-3
    assert steps.mean() <= mean + 1e-3


def test_a_bad_one_among_others() -> None:
    """Pictures may be decoded together; one that can't be, or is of another size, harms no other."""
    decoder = DeviceDecoder(CPU, SMALL)
    pictures = [CHINA.crop((left, 7 * left, 2 * left + 90, 7 * left + 70)) for left in range(4)]
    good = [(jpeg(picture), picture.size) for picture in pictures]
    bad = [(good[0][0][:300], pictures[0].size), (good[1][0], (1, 1)), (b"no picture", (5, 5))]
    asked = [good[0], bad[0], good[1], bad[1], bad[2], *good[2:]] * 4
    alone = [decoder.decode_row(*each) for each in asked]
    assert [row is None for row in alone] == [each in bad for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = pool.map(lambda each: decoder.decode_row(*each), asked)
        for one, other in zip(together, alone, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_trial() -> None:
    """A decoder is compared with Pillow before it is used: by colours, sizes and values."""
    imagenet = PreprocessSpec(resize=232, crop=224)
    for spec in (SMALL, imagenet, replace(imagenet, interpolation="bicubic"), PreprocessSpec()):
        assert matches_cpu(DeviceDecoder(CPU, spec), spec)
    for other in (replace(imagenet, crop=200), replace(imagenet, mean=(0.4, 0.5, 0.485))):
        assert not matches_cpu(DeviceDecoder(CPU, other), imagenet)
    swapped = replace(imagenet, mean=imagenet.mean[::-1], std=imagenet.std[::-1])
    assert not matches_cpu(DeviceDecoder(CPU, swapped), imagenet)


@pytest.mark.parametrize(
    ("how", "device", "says"),
    [(SMALL, "cpu", "there is no GPU"), (replace(SMALL, interpolation="lanczos"), "cuda", "by lanczos")],
)
def test_the_cpu_decodes(caplog: pytest.LogCaptureFixture, how: PreprocessSpec, device: str, says: str) -> None:
    """Where a GPU can't do it there is no decoder, and one line says why."""
    spec = ModelSpec("net", "python:a:b", decode="device")
    assert create_device_decoder(spec, how, torch.device(device)) is None
    (told,) = (vars(each)["fields"] for each in caplog.records)
    assert told["model"] == "net"
    assert says in told["reason"]
