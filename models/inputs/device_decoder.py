"""Decode and preprocess JPEGs on a GPU; all that wait form one batch, because nvJPEG decodes several at once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from io import BytesIO
from math import prod
from threading import Lock

import torch
from PIL import Image
from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.devices.devices import find_lack, is_accelerator
from layertap.models.inputs.preprocess import preprocess, preprocess_pixels
from layertap.models.inputs.sound import Media
from layertap.models.spec import FOR_TENSORS, ModelSpec, PreprocessSpec

log = logging.getLogger("layertap")
MAX_GROUP_PIXELS = 2**26  # in a batch of several pictures; a decoded pixel takes three bytes
TRIAL_SIZE = (96, 64)  # width and height of the pictures that test a decoder
MAX_DIFFERENCE = 4 / 255  # largest mean difference from Pillow, before normalisation; wrong colours differ by more
Row = Future[Tensor | None]  # None if decoding fails
Picture = tuple[bytes, tuple[int, int], Row]  # a JPEG, its width and height, and its row


class DeviceDecoder:
    """The decoder of a model on an accelerator. Any thread may call it; one that holds the lock decodes for all others.

    Only on CUDA devices does nvJPEG decode. Elsewhere torchvision's CPU decoder does, so that all else can be tested.
    """

    def __init__(self, device: torch.device, spec: PreprocessSpec) -> None:
        self._device = device
        self._spec = spec
        self._stream = torch.Stream(device) if is_accelerator(device) else None
        self._waiting: deque[Picture] = deque()
        self._queue, self._turn = Lock(), Lock()

    def decode_row(self, data: bytes, size: tuple[int, int]) -> Tensor | None:
        """Decode a JPEG of that width and height to the model's row, on the device, complete when this returns.

        None if it can't be decoded there for any reason.
        """
        row: Row = Future()
        with self._queue:
            self._waiting.append((data, size, row))
        with self._turn:
            while not row.done():
                group = self._take_group()
                try:
                    self._decode_group(group)
                finally:
                    for _, _, each in group:
                        if not each.done():
                            each.set_result(None)
        return row.result()

    def _take_group(self) -> list[Picture]:
        """The pictures that have waited longest, up to ``MAX_GROUP_PIXELS``."""
        group: list[Picture] = []
        pixels = 0
        with self._queue:
            while self._waiting:
                pixels += prod(self._waiting[0][1])
                if group and pixels > MAX_GROUP_PIXELS:
                    break
                group.append(self._waiting.popleft())
        return group

    def _decode_group(self, group: Sequence[Picture]) -> None:
        """Decode pictures together; if that fails, one at a time, because one bad picture fails the whole batch."""
        with suppress(Exception):  # nvJPEG refuses, out of memory, a lost device: the CPU decodes the picture instead
            for (_, _, row), decoded in zip(group, self._decode_rows(group), strict=True):
                row.set_result(decoded)
            return
        if len(group) > 1:  # the failed attempt's memory is freed here
            for each in group:
                self._decode_group([each])

    def _decode_rows(self, group: Sequence[Picture]) -> list[Tensor]:
        """The rows of pictures, complete when this returns; on an accelerator the decoder uses its own stream."""
        with torch.no_grad(), self._stream or nullcontext():
            decoded = _decode_jpegs([data for data, _, _ in group], self._device)
            for (_, (width, height), _), pixels in zip(group, decoded, strict=True):
                if tuple(pixels.shape) != (3, height, width):
                    raise ValueError("a picture has another size than its header says")
            rows = [preprocess_pixels(pixels.to(self._device), self._spec) for pixels in decoded]
            if self._stream:
                transfer.synchronize_stream(self._device)
        return rows


def create_device_decoder(spec: ModelSpec, preprocessing: Media | None, device: torch.device) -> DeviceDecoder | None:
    """The decoder for a model's device; None if the CPU decodes; the reason is logged if a decoder was asked for."""
    if spec.decode != "device" or preprocessing is None:
        return None
    if reason := find_lack(device, "decode: device"):
        pass
    elif not isinstance(preprocessing, PreprocessSpec):
        reason = f"{preprocessing.name} makes the rows"
    elif not preprocessing.placeable:
        way = "" if preprocessing.interpolation in FOR_TENSORS else f" by {preprocessing.interpolation}"
        reason = f"tensors can't be preprocessed as pictures are{way}"
    else:
        decoder = DeviceDecoder(device, preprocessing)
        if matches_cpu(decoder, preprocessing):
            return decoder
        reason = "what it decodes there is no picture, or another one"
    log.warning("pictures are decoded on the CPU", extra={"fields": {"model": spec.name, "reason": reason}})
    return None


def matches_cpu(decoder: DeviceDecoder, preprocessing: PreprocessSpec) -> bool:
    """Whether a small picture, in colour and in gray, gives nearly the same row as on the CPU."""
    scale = torch.tensor(preprocessing.std).abs().view(3, 1, 1)
    gradient = Image.linear_gradient("L")
    colours = Image.merge("RGB", [gradient.rotate(turn).resize(TRIAL_SIZE) for turn in (0, 90, 180)])
    for picture in (colours, colours.convert("L")):
        stream = BytesIO()
        picture.save(stream, "JPEG", quality=95)
        with Image.open(stream) as image:
            expected = preprocess(image.convert("RGB"), preprocessing)
        row = decoder.decode_row(stream.getvalue(), TRIAL_SIZE)
        if row is None or row.shape != expected.shape:
            return False
        if not float(((row.cpu() - expected) * scale).abs().mean()) <= MAX_DIFFERENCE:
            return False
    return True


def _decode_jpegs(pictures: Sequence[bytes], device: torch.device) -> list[Tensor]:
    """Pictures as RGB on a device, uint8, (3, height, width); raises what a decoder raises."""
    # Imported here: later versions of torchvision may have no decoder, and only this function needs it.
    import torchvision  # noqa: F401  (the whole first, as ``build_model`` does)
    from torchvision.io import ImageReadMode, decode_jpeg

    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in pictures]
    decoded: list[Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    return decoded
