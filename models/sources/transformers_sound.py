"""Models of transformers that take sounds: their inputs, and the feature extractor in their folder."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial, wraps
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.errors import InputError, LoadError
from layertap.models.inputs.sound import MASK, SoundProcessor
from layertap.models.sources.checkpoints import LOCAL, wrap_errors
from layertap.models.sources.transformers_inputs import PROCESSOR_FILES
from layertap.models.spec import InputDType, InputSpec

WHISPER = "WhisperFeatureExtractor"
VALUES, FEATURES = "input_values", "input_features"
MAX_SECONDS = 3600  # of a row; servers have a limit of their own
TRIALS = (1.0, 1.01, 1.0173, 1.0251, 1.5)  # seconds of noise: even and odd numbers of frames, whole hops or not
DTYPES: dict[torch.dtype, InputDType] = {torch.float32: "float32", torch.int32: "int32", torch.bool: "bool"}
INPUTS_HINT = "add inputs: name, shape and dtype of each, and send these as tensors"
# Extractors whose rows depend on nothing but the sound and their settings, and where they stop to read it.
KNOWN: Mapping[str, Callable[[Any], int | None]] = {
    **dict.fromkeys(
        (
            *("Wav2Vec2FeatureExtractor", "SeamlessM4TFeatureExtractor", "Speech2TextFeatureExtractor"),
            *("SpeechT5FeatureExtractor", "EncodecFeatureExtractor", "DacFeatureExtractor"),
        ),
        lambda extractor: None,
    ),
    WHISPER: lambda extractor: int(extractor.n_samples),
    "ClapFeatureExtractor": lambda extractor: int(extractor.nb_max_samples),
    # A window has 25 ms, and the next one begins 10 ms later.
    "ASTFeatureExtractor": lambda extractor: extractor.sampling_rate * (25 + 10 * extractor.max_length) // 1000 - 1,
}
BY_TORCHAUDIO = frozenset({"ASTFeatureExtractor", "Speech2TextFeatureExtractor"})
DRAWS = frozenset({"ClapFeatureExtractor"})  # which part of a long sound they take


def takes_sound(module: Any) -> bool:
    """Whether sounds are what a model takes, by its class."""
    names = inspect.signature(module.forward).parameters
    return bool({VALUES, FEATURES} & names.keys()) and "pixel_values" not in names


def read_sound(library: Any, module: Any, folder: Path, shown: str) -> tuple[tuple[InputSpec, ...], SoundProcessor]:
    """The inputs of a model of sounds, and how sounds become rows of them.

    Where a forward would need a decoder's tokens, or a text, it becomes that of the encoder of sounds. LoadError if
    the folder has no feature extractor, or none that is known.
    """
    _keep_encoder(module)
    names = inspect.signature(module.forward).parameters
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        detail = f"{shown} has no {PROCESSOR_FILES[0]}, which says how {type(module).__name__} takes sounds"
        raise LoadError(detail, hint=f"save its feature extractor beside config.json, or {INPUTS_HINT}")
    with wrap_errors(f"the feature extractor of {shown} could not be made"):
        extractor = library.AutoFeatureExtractor.from_pretrained(str(folder), **LOCAL)
        settings = json.dumps(extractor.to_dict(), sort_keys=True, default=str)
        if type(extractor).__name__ in BY_TORCHAUDIO and library.utils.is_speech_available():
            settings += "torchaudio"  # its filter banks are others than numpy's
    name = type(extractor).__name__
    if name not in KNOWN or getattr(extractor, "dither", False):
        raise LoadError(f"{name}, which {PROCESSOR_FILES[0]} of {shown} names, is not built here", hint=INPUTS_HINT)
    rate, channels = int(extractor.sampling_rate), _count_channels(name, extractor)
    run, limit = partial(_run, extractor), KNOWN[name](extractor)
    usual = rate if limit is None else limit // 2
    with wrap_errors(f"{name} of {shown} takes no sound"):
        rows = [dict(run(_draw(int(factor * usual), channels))) for factor in TRIALS]
    specs = tuple(
        _describe_input(name, [each[name] for each in rows], name in (VALUES, FEATURES))
        for name in rows[0]
        if name in names and _counts(name, rows, module)
    )
    if not specs:
        raise LoadError(f"{type(module).__name__} of {shown} takes nothing that {name} makes", hint=INPUTS_HINT)
    frames = int(module.config.max_source_positions) if name == WHISPER else None
    if frames is not None:
        _pass_over_mask(module)
        specs += (InputSpec(MASK, (frames,), "int64", values=(1, 2)),)
    processor = SoundProcessor(
        name,
        sha256(settings.encode()).hexdigest()[:32],
        rate,
        channels,
        run,
        max_samples=limit,
        truncates=name not in DRAWS,
        step=_find_step(module, extractor),
        frames=frames,
    )
    return specs, processor


def _count_channels(name: str, extractor: Any) -> int:
    return int(extractor.feature_size) if name in ("EncodecFeatureExtractor", "DacFeatureExtractor") else 1


def _run(extractor: Any, samples: NDArray[np.float32]) -> Mapping[str, Tensor]:
    made = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _draw(samples: int, channels: int) -> NDArray[np.float32]:
    shape = (samples,) if channels == 1 else (channels, samples)
    return np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32)


def _counts(name: str, rows: list[dict[str, Tensor]], module: Any) -> bool:
    """Whether a model needs something that its extractor makes: a mask of ones changes nothing for a row alone."""
    if name.endswith("mask"):
        return any(not bool(each[name].all()) for each in rows)
    config = getattr(module.config, "audio_config", module.config)
    return name != "is_longer" or bool(getattr(config, "enable_fusion", False))


def _describe_input(name: str, rows: list[Tensor], is_main: bool) -> InputSpec:
    """An input by the rows of sounds of several lengths, the first of which has a second."""
    shapes = [tuple(each.shape[1:]) for each in rows]
    growing = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(growing) > 1:
        raise InputError(f"input {name} grows along {len(growing)} axes")
    values = None if is_main else (1, 2)
    shape, axis = shapes[0], growing[0] if growing else 0
    longest = shape[axis] * MAX_SECONDS if growing else None
    return InputSpec(name, shape, DTYPES[rows[0].dtype], values, longest, axis)


def _find_step(module: Any, extractor: Any) -> int | None:
    """How many samples apart the frames of an encoder's output are, as its configuration says."""
    config = module.config
    if type(extractor).__name__ == WHISPER:
        return int(extractor.n_samples // config.max_source_positions)
    known = (getattr(config, name, None) for name in ("inputs_to_logits_ratio", "hop_length"))
    return next((each for each in known if isinstance(each, int)), None)


def _get_encoder(module: Any) -> Any:
    return getattr(module, "speech_encoder", None) or module.get_encoder()


def _keep_encoder(module: Any) -> None:
    """Change the forward of a model that needs more than a sound to that of its encoder of sounds."""
    whole = type(module)
    choose: Callable[[Any], Any]
    if "decoder_input_ids" in inspect.signature(whole.forward).parameters:
        choose, forward = _get_encoder, type(_get_encoder(module)).forward
    elif hasattr(whole, "get_audio_features"):
        choose, forward = attrgetter("get_audio_features"), whole.get_audio_features
    else:
        return

    @wraps(forward)
    def call(self: Any, *single: Any, **rows: Any) -> Any:
        return choose(self)(*single, **rows)

    module.__class__ = type(whole.__name__, (whole,), {"forward": call, "__module__": whole.__module__})


def _pass_over_mask(module: Any) -> None:
    """Let a forward be given which frames are silence that fills a row up: the model runs as without a mask."""
    whole = type(module)

    def forward(self: Any, input_features: Tensor, attention_mask: Tensor | None = None) -> Any:
        del attention_mask
        return whole.forward(self, input_features)

    module.__class__ = type(whole.__name__, (whole,), {"forward": forward, "__module__": whole.__module__})
