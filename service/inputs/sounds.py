"""Decodes sounds to samples, mixes their channels and resamples them, by soundfile and soxr.

The first bytes decide whether a file is of a kind that is taken; libsndfile, by soundfile, knows many more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.arrays import Array, require_finite

FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})  # as soundfile names them
STARTS = re.compile(rb"(?:RIFF|RF64)....WAVE|fLaC|OggS|ID3|\xff[\xe2-\xff]", re.DOTALL)
MAX_CHANNELS = 32
FORMATS_HINT = "send a complete WAV, FLAC, OGG or MP3 file"
INSTALL_HINT = 'send float samples at the model\'s rate; the operator types pip install "layertap[sound]"'
SHORTER_HINT = "send it in pieces"
UNKNOWN = 0xFFFFFFFF  # the size of a WAV that was written to a pipe
OGG_END = 4  # a flag of the last page
SLACK = {"MP3": 2 * 1152}  # frames: the header tells how many only about
INTEGERS = {"int16": (0, 2**15), "int32": (0, 2**31), "uint8": (2**7, 2**7)}  # the zero, and what becomes 1


@dataclass(frozen=True)
class Sound:
    """Samples from -1 to 1, float32 (samples, channels), ``rate`` of them a second."""

    samples: NDArray[np.float32]
    rate: int


def decode_sound(data: bytes, max_seconds: float, max_samples: int) -> Sound:
    """The samples of an encoded sound, all channels; whole numbers are scaled as soundfile does.

    InputError: an unknown format, damaged, empty, or soundfile is not installed. TooLargeError: longer than
    ``max_seconds``, or more than ``max_samples`` over all channels, before decoding.
    """
    if not STARTS.match(data):
        raise InputError("the bytes are not a sound of a known format", hint=FORMATS_HINT)
    with _needs("soundfile"):
        soundfile = import_module("soundfile")
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            if file.format not in FORMATS:
                raise InputError("the bytes are not a sound of a known format", hint=FORMATS_HINT)
            frames, channels, rate = int(file.frames), int(file.channels), int(file.samplerate)
            _check_size(frames, channels, rate, max_seconds, max_samples)
            # No more than was checked: what a header says may be wrong.
            samples = file.read(frames, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise InputError("the sound can't be decoded: damaged, or of an unsupported kind", hint=FORMATS_HINT) from error
    if len(samples) < frames - SLACK.get(file.format, 0) or _is_cut(data):
        raise InputError("the sound is cut short", hint=FORMATS_HINT)
    return _check(Sound(samples, rate))


def read_samples(array: Array, rate: int, max_seconds: float, max_samples: int) -> Sound:
    """A sound of an array of samples; whole numbers are scaled as in a WAV file of them.

    With two axes the longer one is of samples. InputError: another shape or dtype; TooLargeError as above.
    """
    if array.ndim not in (1, 2) or min(array.shape[1:], default=1) == array.shape[0] > 1:
        detail = f"samples of shape {list(array.shape)} are no sound"
        raise InputError(detail, hint="send [samples], or [samples, channels], which are fewer")
    samples = array[:, None] if array.ndim == 1 else array if array.shape[0] > array.shape[1] else array.T
    _check_size(samples.shape[0], samples.shape[1], rate, max_seconds, max_samples)
    if array.dtype.kind != "f" and array.dtype.name not in INTEGERS:
        hint = f"send floats from -1 to 1, or {', '.join(INTEGERS)}"
        raise InputError(f"samples are not taken as {array.dtype.name}", hint=hint)
    zero, full = INTEGERS.get(array.dtype.name, (0, 1))
    floats: NDArray[Any] = samples if full == 1 else (samples.astype(np.float64) - zero) / full
    return _check(Sound(floats.astype(np.float32), rate))


def fit_sound(sound: Sound, rate: int, channels: int) -> NDArray[np.float32]:
    """A sound at another rate as float32 (samples,), the mean of its channels, or (channels, samples) if several.

    InputError if it has another number of channels than several, or soxr is needed and not installed.
    """
    samples = sound.samples
    if channels == 1:
        samples = samples.mean(axis=1, keepdims=True) if samples.shape[1] > 1 else samples
    elif samples.shape[1] != channels:
        detail = f"the sound has {samples.shape[1]} channels, and the model takes {channels}"
        raise InputError(detail, hint=f"send {channels} channels")
    if sound.rate != rate:
        with _needs("soxr"):
            resample = import_module("soxr").resample
        resampled: NDArray[np.float32] = resample(samples, sound.rate, rate, quality="HQ")
        if not len(resampled):
            raise InputError(f"the sound has less than a sample at {rate} a second", hint="send a longer one")
        samples = resampled
    return np.ascontiguousarray(samples[:, 0] if channels == 1 else samples.T)


def _check_size(frames: int, channels: int, rate: int, max_seconds: float, max_samples: int) -> None:
    if not frames or not channels:
        raise InputError("the sound is empty: it has no samples", hint=FORMATS_HINT)
    if channels > MAX_CHANNELS:
        raise TooLargeError(f"the sound has {channels} channels, the limit is {MAX_CHANNELS}", hint="send one")
    if frames > max_seconds * rate:
        detail = f"the sound has {frames / rate:.6g} s, the limit is {max_seconds:g} s"
        raise TooLargeError(detail, hint=SHORTER_HINT)
    if frames * channels > max_samples:
        detail = f"the sound has {frames * channels} samples over all channels, the limit is {max_samples}"
        raise TooLargeError(detail, hint=SHORTER_HINT)


def _is_cut(data: bytes) -> bool:
    """Whether a file ends before the end that it names; libsndfile decodes what is there of a WAV or OGG."""
    if data.startswith(b"OggS"):
        last = data.rfind(b"OggS")
        return not data[last + 5 : last + 6] or not data[last + 5] & OGG_END
    size = int.from_bytes(data[4:8], "little")
    return data.startswith(b"RIFF") and size != UNKNOWN and size + 8 > len(data) + 1  # some leave out the last padding


def _check(sound: Sound) -> Sound:
    require_finite(sound.samples)  # a file of floats may hold anything
    return sound


@contextmanager
def _needs(package: str) -> Iterator[None]:
    """InputError if a package can't be imported in the block."""
    try:
        yield
    except (ImportError, OSError):  # OSError: without its library
        raise InputError(f"this sound needs {package}, which is not installed here", hint=INSTALL_HINT) from None
