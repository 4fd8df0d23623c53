"""Write tiny models with random weights, a sound, a video, and configurations that serve them, into a folder.

.venv/bin/python examples/tiny_models.py out/tiny
"""

from __future__ import annotations

import math
import struct
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import av
import numpy as np
import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

# The tokenizer knows letters only.
PIECES = [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
WORDS = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES])}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = {"vocab_size": len(WORDS), "initializer_range": 0.5, **SIZES}
CONFIGURATION = """
models:
  - {name: reranker, source: "transformers:reranker", device: cpu}
  - {name: splade, source: "transformers:splade", device: cpu}
  - {name: colbert, source: "transformers:colbert", device: cpu}
  - {name: wave, source: "transformers:wave", device: cpu}
aliases: {rerank: reranker}
"""
OF_VIDEOS = """
models:
  - {name: clips, source: "transformers:clips", device: cpu}
"""


def write_reranker(folder: Path) -> None:
    """A cross-encoder: one score for two texts."""
    config = transformers.BertConfig(**BERT, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    transformers.BertTokenizer(vocab=WORDS).save_pretrained(folder)


def write_splade(folder: Path) -> None:
    """A sparse encoder: a number for each word of the vocabulary."""
    config = transformers.BertConfig(**BERT)
    encoder = _write_encoder(folder, transformers.BertForMaskedLM(config), transformer_task="fill-mask")
    SparseEncoder(modules=[encoder, SpladePooling("max")]).save_pretrained(str(folder))


def write_colbert(folder: Path) -> None:
    """A model of late interaction: a vector for each token."""
    of_tokens = {"module_input_name": "token_embeddings"}
    encoder = _write_encoder(folder, transformers.BertModel(transformers.BertConfig(**BERT)))
    modules = [encoder, Dense(32, 8, bias=False, activation_function=None, **of_tokens), Normalize(**of_tokens)]
    MultiVectorEncoder(modules=modules).save_pretrained(str(folder))


def _write_encoder(folder: Path, model: transformers.PreTrainedModel, **options: str) -> Transformer:
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab=WORDS).save_pretrained(folder)
    return Transformer(str(folder), max_seq_length=64, **options)


def write_wave(folder: Path) -> None:
    """A model of sounds, and beside it a second of a tone, ``tone.wav``."""
    transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SIZES)).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    with wave.open(str(folder.parent / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 44100, 0, "NONE", ""))
        file.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(0.05 * n))) for n in range(44100)))


def write_clips(folder: Path) -> None:
    """A model of videos, and beside it three seconds that become light, ``clip.mp4``."""
    config = transformers.VideoMAEConfig(num_frames=4, image_size=32, **SIZES)
    transformers.VideoMAEModel(config).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    transformers.VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    with av.open(str(folder.parent / "clip.mp4"), "w") as file:
        track = file.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        for number in range(30):
            picture = np.full((48, 64, 3), 8 * number, np.uint8)
            file.mux(track.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(track.encode())


MODELS: dict[str, Callable[[Path], None]] = {
    "reranker": write_reranker,
    "splade": write_splade,
    "colbert": write_colbert,
    "wave": write_wave,
    "clips": write_clips,
}


def main(folder: Path) -> None:
    """Write all of them."""
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, write) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        (folder / name).mkdir(parents=True, exist_ok=True)
        write(folder / name)
    (folder / "models.yaml").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "clips.yaml").write_text(OF_VIDEOS, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
