"""Pictures made rows by torch's functions for tensors: near to Pillow's, each its own, refused where one is bad.

What a GPU does is run by torchvision's decoder on the CPU here; ``tests/gpu`` runs it there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvf

from layertap.models.inputs.device_decoder import DeviceDecoder, create_device_decoder, matches_cpu
from layertap.models.inputs.preprocess import preprocess_pixels
from layertap.models.spec import FOR_TENSORS, Interpolation, ModelSpec, PreprocessSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")  # torchvision names a successor
CPU = torch.device("cpu")
CHINA = Image.fromarray(load_sample_image("china.jpg"))
PLAIN = PreprocessSpec(resize=64, crop=56, mean=(0, 0, 0), std=(1, 1, 1))
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
    decoder = DeviceDecoder(CPU, PLAIN)
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
    for spec in (PLAIN, imagenet, replace(imagenet, interpolation="bicubic"), PreprocessSpec()):
        assert matches_cpu(DeviceDecoder(CPU, spec), spec)
    for other in (replace(imagenet, crop=200), replace(imagenet, mean=(0.4, 0.5, 0.485))):
        assert not matches_cpu(DeviceDecoder(CPU, other), imagenet)
    swapped = replace(imagenet, mean=imagenet.mean[::-1], std=imagenet.std[::-1])
    assert not matches_cpu(DeviceDecoder(CPU, swapped), imagenet)


@pytest.mark.parametrize(
    ("how", "device", "says"),
    [
        (PLAIN, "cpu", "there is no GPU"),
        (replace(PLAIN, interpolation="lanczos"), "cuda", "by lanczos"),
    ],
)
def test_the_cpu_decodes(caplog: pytest.LogCaptureFixture, how: PreprocessSpec, device: str, says: str) -> None:
    """Where a GPU can't do it there is no decoder, and one line says why."""
    spec = ModelSpec("net", "python:a:b", decode="device")
    assert create_device_decoder(spec, how, torch.device(device)) is None
    (told,) = (vars(each)["fields"] for each in caplog.records)
    assert told["model"] == "net"
    assert says in told["reason"]
