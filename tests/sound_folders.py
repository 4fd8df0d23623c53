"""Folders of tiny seeded models of sounds with their feature extractors, as transformers saves them, and sounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.oracle import Key, record, seeded

Samples = NDArray[np.float32]
BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONVOLUTIONS = {
    "conv_dim": [8, 8],
    "conv_stride": [10, 16],
    "conv_kernel": [12, 16],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
WAVE = BODY | CONVOLUTIONS
LAYER_NORM = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
HALVES = {
    f"{half}_{name}": value
    for half in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()
}
SPEECH = HALVES | {"d_model": 32, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER = SPEECH | {"max_source_positions": 50, "max_target_positions": 8, "decoder_start_token_id": 1}
CLAP_AUDIO = {
    "spec_size": 64,
    "patch_embeds_hidden_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "depths": [1, 1],
    "num_attention_heads": [2, 2],
    "window_size": 4,
    "num_mel_bins": 16,
    "projection_dim": 16,
    "patch_size": 4,
    "patch_stride": [4, 4],
}
CLAP_TEXT = {**BODY, "vocab_size": 20, "max_position_embeddings": 40, "projection_dim": 16}
CLAP_FEATURES = {
    "feature_size": 16,
    "max_length_s": 1,
    "sampling_rate": 16000,
    "hop_length": 160,
    "frequency_max": 8000,
}
ENCODEC = {
    "num_filters": 4,
    "hidden_size": 16,
    "upsampling_ratios": [40, 32],
    "codebook_size": 16,
    "codebook_dim": 16,
    "sampling_rate": 8000,
    "target_bandwidths": [0.4],  # five codebooks
    "num_lstm_layers": 1,
}
MIMI = {
    "num_filters": 4,
    "hidden_size": 32,
    "upsampling_ratios": [10, 8],
    "codebook_size": 16,
    "codebook_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_quantizers": 4,
    "num_semantic_quantizers": 1,
    "vector_quantization_hidden_dimension": 16,
    "sampling_rate": 8000,
    "upsample_groups": 32,
    "sliding_window": 20,
}
DAC = {
    "encoder_hidden_size": 8,
    "downsampling_ratios": [8, 10],
    "decoder_hidden_size": 16,
    "n_codebooks": 2,
    "codebook_size": 16,
    "codebook_dim": 4,
    "hidden_size": 32,
    "sampling_rate": 4000,
}


@dataclass(frozen=True)
class Kind:
    """A model's class with its configuration, and its feature extractor; ``encoder`` finds what takes sounds in it."""

    model: str
    config: str
    options: dict[str, Any]
    extractor: str
    settings: dict[str, Any]
    encoder: Callable[[Any], Any] = lambda module: module

    def save(self, folder: Path) -> Any:
        """Save a module and its feature extractor in a folder; the module as the library loads it."""
        whole = getattr(transformers, self.model)
        seeded(whole(getattr(transformers, self.config)(**self.options)), 0).save_pretrained(folder)
        getattr(transformers, self.extractor)(**self.settings).save_pretrained(folder)
        return whole.from_pretrained(folder).eval().requires_grad_(False)


WAV2VEC2 = "Wav2Vec2FeatureExtractor"
KINDS = {
    "wav2vec2": Kind("Wav2Vec2Model", "Wav2Vec2Config", WAVE, WAV2VEC2, {}),
    "unscaled": Kind("Wav2Vec2Model", "Wav2Vec2Config", WAVE, WAV2VEC2, {"do_normalize": False}),
    "wav2vec2_masked": Kind(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", WAVE | LAYER_NORM, WAV2VEC2, {"return_attention_mask": True}
    ),
    "hubert": Kind("HubertModel", "HubertConfig", WAVE, WAV2VEC2, {}),
    "wavlm": Kind("WavLMModel", "WavLMConfig", WAVE, WAV2VEC2, {}),
    "data2vec": Kind("Data2VecAudioModel", "Data2VecAudioConfig", WAVE, WAV2VEC2, {}),
    "unispeech_sat": Kind("UniSpeechSatModel", "UniSpeechSatConfig", WAVE, WAV2VEC2, {}),
    "sew": Kind("SEWModel", "SEWConfig", WAVE, WAV2VEC2, {}),
    "wav2vec2_bert": Kind(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        BODY | {"feature_projection_input_dim": 160, "conv_depthwise_kernel_size": 3},
        "SeamlessM4TFeatureExtractor",
        {},
    ),
    "seamless": Kind(
        "SeamlessM4TForSpeechToText",
        "SeamlessM4TConfig",
        HALVES
        | {
            f"speech_encoder_{name}": n
            for name, n in (("layers", 1), ("attention_heads", 4), ("intermediate_size", 48))
        }
        | {"vocab_size": 50, "hidden_size": 32, "max_position_embeddings": 64},
        "SeamlessM4TFeatureExtractor",
        {},
        lambda module: module.speech_encoder,
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        "WhisperFeatureExtractor",
        {"chunk_length": 1},
        lambda module: module.model.encoder,
    ),
    "whisper_classifier": Kind(
        "WhisperForAudioClassification", "WhisperConfig", WHISPER, "WhisperFeatureExtractor", {"chunk_length": 1}
    ),
    "ast": Kind(
        "ASTModel",
        "ASTConfig",
        BODY | {"max_length": 100, "num_mel_bins": 32},
        "ASTFeatureExtractor",
        {"num_mel_bins": 32, "max_length": 100},
    ),
    "clap_audio": Kind(
        "ClapAudioModelWithProjection",
        "ClapAudioConfig",
        CLAP_AUDIO | {"enable_fusion": False},
        "ClapFeatureExtractor",
        CLAP_FEATURES | {"truncation": "rand_trunc"},
    ),
    "clap": Kind(
        "ClapModel",
        "ClapConfig",
        {"audio_config": CLAP_AUDIO | {"enable_fusion": True}, "text_config": CLAP_TEXT, "projection_dim": 16},
        "ClapFeatureExtractor",
        CLAP_FEATURES | {"truncation": "fusion"},
        lambda module: module.get_audio_features,
    ),
    "speech_to_text": Kind(
        "Speech2TextModel",
        "Speech2TextConfig",
        SPEECH | {"conv_channels": 16, "max_source_positions": 400},
        "Speech2TextFeatureExtractor",
        {},
        lambda module: module.encoder,
    ),
    "moonshine": Kind(
        "MoonshineModel",
        "MoonshineConfig",
        {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
        | {f"{half}_num_{what}": n for half in ("encoder", "decoder") for what, n in {"hidden_layers": 1}.items()}
        | {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
        WAV2VEC2,
        {"do_normalize": False},
        lambda module: module.encoder,
    ),
    "speecht5": Kind(
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        {**CONVOLUTIONS, **HALVES, "hidden_size": 32, "vocab_size": 50},
        "SpeechT5FeatureExtractor",
        {},
        lambda module: module.get_encoder(),
    ),
    "encodec": Kind("EncodecModel", "EncodecConfig", ENCODEC, "EncodecFeatureExtractor", {"sampling_rate": 8000}),
    "encodec_stereo": Kind(
        "EncodecModel",
        "EncodecConfig",
        ENCODEC | {"audio_channels": 2, "sampling_rate": 16000, "target_bandwidths": [0.5]},
        "EncodecFeatureExtractor",
        {"feature_size": 2, "sampling_rate": 16000},
    ),
    "dac": Kind("DacModel", "DacConfig", DAC, "DacFeatureExtractor", {"hop_length": 80, "sampling_rate": 4000}),
    "mimi": Kind("MimiModel", "MimiConfig", MIMI, "EncodecFeatureExtractor", {"sampling_rate": 8000}),
}


def draw(seconds: float, rate: int = 16000, channels: int = 1, seed: int = 0) -> Samples:
    """Tones and noise, (samples, channels), exact in 16 bits."""
    times = np.arange(int(seconds * rate)) / rate
    generator = np.random.default_rng(seed)
    tones = [np.sin(2 * np.pi * (220 + 110 * (seed + channel)) * times) for channel in range(channels)]
    sound = 0.3 * np.stack(tones, axis=1) + generator.normal(0, 0.05, (len(times), channels))
    return (np.round(sound * 2**15) / 2**15).astype(np.float32)


def encode(samples: Samples, rate: int = 16000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of a sound."""
    stream = BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


def load(data: bytes, rate: int) -> Samples:
    """A file's samples at a rate, (samples, channels), as people load it."""
    samples, own = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)
    return samples if own == rate else soxr.resample(samples.mean(1, keepdims=True), own, rate)


def make_features(folder: Path, samples: Samples) -> dict[str, Tensor]:
    """A sound by a folder's own feature extractor, alone."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    several = getattr(extractor, "feature_size", 1) if "Encodec" in type(extractor).__name__ else 1
    given = samples.T if several == 2 else samples.mean(1)
    return dict(extractor(given, sampling_rate=extractor.sampling_rate, return_tensors="pt"))


def run(kind: Kind, module: Any, features: dict[str, Tensor]) -> dict[Key, Tensor]:
    """What plain hooks on the library's model see of a sound; what its encoder returns is the output of "."."""
    encoder = kind.encoder(module)
    names = inspect.signature(getattr(encoder, "forward", encoder)).parameters
    given = {name: value for name, value in features.items() if name in names}
    if encoder is not module:
        vars(module)["forward"] = lambda **rows: encoder(**rows)
    try:
        return record(module, **given)
    finally:
        vars(module).pop("forward", None)


class Waves(nn.Module):
    """A net of samples and their rate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 32, 16)

    def forward(self, x: Tensor, sr: int) -> Tensor:
        return self.conv(x[:, None]) * (sr / 16000)
