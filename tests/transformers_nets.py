"""Tiny models of the transformers library with seeded weights, saved as directories, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor

from tests.oracle import seeded

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "sat", "on", "the", "mat", "and", "saw", "red")
VOCABULARY, POSITIONS = 20, 40
CLS, SEP = 2, 3
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
PICTURE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
PATCHES = {key: value for key, value in PICTURE.items() if key != "image_size"} | {"num_patches": 16}
CLIP_TEXT = TEXT | {"projection_dim": 16, "bos_token_id": CLS, "eos_token_id": SEP, "pad_token_id": 0}
CLIP_PICTURE = PICTURE | {"projection_dim": 16}
DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": POSITIONS,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
GROUPS = dict.fromkeys(
    ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), 2
)


def _made(model: str, config: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


NETS: dict[str, Callable[[], Any]] = {
    "bert": _made("BertModel", "BertConfig", **TEXT),
    "classifier": _made("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=3),
    "convolving": _made("SqueezeBertModel", "SqueezeBertConfig", **TEXT, **GROUPS, embedding_size=32),
    "mixing": _made("MixtralModel", "MixtralConfig", **TEXT, num_key_value_heads=2, num_local_experts=4),
    "roberta": _made("RobertaModel", "RobertaConfig", **TEXT),
    "distilbert": _made("DistilBertModel", "DistilBertConfig", **DISTIL),
    "gpt2": _made("GPT2LMHeadModel", "GPT2Config", **GPT),
    "llama": _made("LlamaForCausalLM", "LlamaConfig", **TEXT, num_key_value_heads=2, eos_token_id=SEP),
    "sliding": _made("MistralForCausalLM", "MistralConfig", **TEXT, num_key_value_heads=2, sliding_window=4),
    "answering": _made("BertForQuestionAnswering", "BertConfig", **TEXT),
    "clip_text": _made("CLIPTextModelWithProjection", "CLIPTextConfig", **CLIP_TEXT),
    "clip_picture": _made("CLIPVisionModelWithProjection", "CLIPVisionConfig", **CLIP_PICTURE),
    "clip": _made("CLIPModel", "CLIPConfig", text_config=CLIP_TEXT, vision_config=CLIP_PICTURE, projection_dim=16),
    "siglip": _made("SiglipModel", "SiglipConfig", text_config=TEXT, vision_config=PICTURE),
    "siglip2": _made("Siglip2Model", "Siglip2Config", text_config=TEXT, vision_config=PATCHES),
    "chinese_clip": _made(
        "ChineseCLIPModel", "ChineseCLIPConfig", text_config=TEXT, vision_config=CLIP_PICTURE, projection_dim=16
    ),
    "vit": _made("ViTForImageClassification", "ViTConfig", **PICTURE, num_labels=3),
    "deit": _made("DeiTModel", "DeiTConfig", **PICTURE),
    "registers": _made("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", **PICTURE, num_register_tokens=3),
    "backbone": _made("Dinov2Backbone", "Dinov2Config", **PICTURE, out_features=["stage1", "stage2"]),
    "wave": _made(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=[8, 8],
        conv_stride=[4, 4],
        conv_kernel=[8, 8],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    ),
}


def net(name: str, seed: int = 0) -> Any:
    """A model with weights that hide nothing, in eval mode."""
    return seeded(NETS[name](), seed).eval().requires_grad_(False)


def saved(name: str, folder: Path, seed: int = 0) -> Any:
    """The same, saved in a directory."""
    module = net(name, seed)
    module.save_pretrained(folder)
    return module


def tokenizer(folder: Path, *, specials: bool = True, **options: Any) -> Any:
    """A tokenizer of a few words with a class token in front and a separator behind, if any, saved in a directory."""
    own = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    own.normalizer = normalizers.Lowercase()
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if specials else "$A", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"} if specials else {}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **{"unk_token": "[UNK]", **names, **options})
    whole.save_pretrained(folder)
    return whole


def texts(rows: int, length: int, *, padded: bool, seed: int = 0) -> dict[str, Tensor]:
    """Rows of random tokens; of padded ones each is shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows) if padded else ():
        mask[row, length - row :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def pictures(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of random pixels."""
    return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))}
