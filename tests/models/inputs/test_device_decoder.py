"""Who decodes pictures under ``decode: device``, and why the CPU does instead; here the CPU stands in for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from layertap.models.inputs.device_decoder import DeviceDecoder, create_device_decoder, matches_cpu
from layertap.models.inputs.preprocess import LibraryProcessor, Preprocessing
from layertap.models.spec import ModelSpec, PreprocessSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HOW = PreprocessSpec(resize=40, crop=32)


def refuse(image: Image.Image) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("how", "device", "reason"),
    [
        (HOW, CPU, "there is no GPU"),
        (HOW, torch.device("xpu", 0), "decode: device needs CUDA, and torchvision with nvJPEG"),
        (LibraryProcessor("SomeProcessor", "", refuse), CUDA, "SomeProcessor makes the rows"),
        (replace(HOW, interpolation="hamming"), CUDA, "tensors can't be preprocessed as pictures are by hamming"),
    ],
)
def test_refused(how: Preprocessing, device: torch.device, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why a decoder that was asked for is not used; where none was asked for nothing is said."""
    spec = ModelSpec("a", "python:a:b", decode="device")
    assert create_device_decoder(replace(spec, decode="exact"), how, device) is None
    assert create_device_decoder(spec, None, device) is None
    assert not caplog.records
    assert create_device_decoder(spec, how, device) is None
    assert [record.fields["reason"] for record in caplog.records] == [reason]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "matches"),
    [
        (lambda how: how, True),
        (lambda how: replace(how, crop=24), False),
        (lambda how: replace(how, mean=(0.0, 0.0, 0.0)), False),
    ],
    ids=["same", "other size", "other colours"],
)
def test_trial(change: Callable[[PreprocessSpec], PreprocessSpec], matches: bool) -> None:
    """A decoder is used if its rows of a trial picture have the CPU's size and nearly its numbers."""
    assert matches_cpu(DeviceDecoder(CPU, change(HOW)), HOW) == matches
