"""Folders that sentence-transformers saves, of tiny seeded models; older layouts are written as its releases did."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from sentence_transformers.sparse_encoder import modules as sparse
from torch import Tensor, nn

from tests.oracle import seeded
from tests.transformers_nets import CLIP_PICTURE, CLIP_TEXT, DISTIL, TEXT, WORDS, tokenizer

LIMIT = 12
PROMPTS = {"query": "the red dog : ", "document": ""}
QUERY = {"prompts": {"query": "the red dog : "}}
KNOWN = ["PAD", *WORDS[4:], "DOG,"]  # of whole words
TEMPLATE = """{% for each in messages %}{% if each['role'] == 'system' %}the red {% endif %}{{
each['content'] if each['content'] is string else each['content'][0]['text'] }} {% endfor %}on the mat"""
FIXED = {"strategy": "fixed", "attend": False, "length": 10}
LEAST = {"strategy": "min", "attend": True, "length": 8}
SMALL = {key: value for key, value in TEXT.items() if key != "max_position_embeddings"}
T5 = {"vocab_size": 20, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def _bert(**options: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**TEXT | options))


ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": _bert,
    "bert_without_pooler": lambda: transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**TEXT)),
    "xlm_roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**TEXT, pad_token_id=0)),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
    "qwen2": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**TEXT, num_key_value_heads=2)),
    "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT | {"vocab_size": len(WORDS)})),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_PICTURE, projection_dim=16)
    ),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**TEXT, pad_token_id=0, cls_token_id=2, sep_token_id=3)
    ),
}


def _dense(width: int, out: int, activation: nn.Module | None, **options: Any) -> Any:
    return modules.Dense(width, out, activation_function=activation, **options)


def _pooled(modes: str | Sequence[str], width: int = 32, **options: Any) -> Any:
    return modules.Pooling(width, tuple(modes) if not isinstance(modes, str) else modes, **options)


def _encode(folder: Path, kind: str = "bert", *, saved: Any = None, **options: Any) -> Any:
    """The transformer, whose tokenizer is made with the options ``saved``."""
    _save_encoder(kind, folder / "encoder", **saved or {})
    return modules.Transformer(str(folder / "encoder"), **{"max_seq_length": LIMIT, **options})


def _towers(folder: Path, kind: Any) -> Any:
    """A model of texts and pictures, and how it takes these."""
    _save_encoder("clip", folder / "encoder", model_max_length=LIMIT)
    size = {"height": 32, "width": 32}
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    texts = transformers.AutoTokenizer.from_pretrained(folder / "encoder")
    transformers.CLIPProcessor(pictures, texts).save_pretrained(folder / "encoder")
    return kind(str(folder / "encoder"))


def _scores(folder: Path, **options: Any) -> Any:
    return _encode(folder, "masked", transformer_task="fill-mask", **options)


def _vectors(folder: Path, **options: Any) -> list[Any]:
    """A vector for each token but some."""
    of_tokens = {"module_input_name": "token_embeddings"}
    return [
        _encode(folder, saved={"mask_token": "cat"}, **options),
        _dense(32, 8, None, bias=False, **of_tokens),
        MultiVectorMask(skiplist_words=["dog"]),
        modules.Normalize(**of_tokens),
    ]


def _words() -> Any:
    return modules.WordEmbeddings(WhitespaceTokenizer(KNOWN), _draw(len(KNOWN), 8), max_seq_length=9)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _ways(folder: Path) -> Any:
    """Of queries each word has a weight; documents have a model."""
    document = [_scores(folder), sparse.SpladePooling("max")]
    tokens = transformers.AutoTokenizer.from_pretrained(folder / "encoder")
    return modules.Router.for_query_document(
        [sparse.SparseStaticEmbedding(tokens, weight=_draw(len(WORDS)).abs())], document
    )


def _heads() -> Any:
    return modules.Router.for_query_document(
        [_dense(32, 8, nn.Tanh())], [_dense(32, 8, None), modules.Normalize()], default_route="query"
    )


Make = Callable[[Path], list[Any]]
# What each model is made of, and what it is told besides.
VECTORS: dict[str, tuple[Make, dict[str, Any]]] = {
    "mean": (lambda folder: [_encode(folder), _pooled("mean"), modules.Normalize()], {}),
    "cls": (lambda folder: [_encode(folder, "distilbert"), _pooled("cls")], {}),
    "max": (lambda folder: [_encode(folder, "modernbert"), _pooled("max")], {}),
    "sqrt": (lambda folder: [_encode(folder, "xlm_roberta"), _pooled("mean_sqrt_len_tokens")], {}),
    "weighted": (lambda folder: [_encode(folder, "mpnet"), _pooled("weightedmean"), modules.Normalize()], {}),
    "last": (lambda folder: [_encode(folder, "qwen2"), _pooled("lasttoken"), modules.Normalize()], {}),
    "several": (
        lambda folder: [
            _encode(folder),
            _pooled(("cls", "mean", "lasttoken")),
            _dense(96, 24, nn.GELU()),
            _dense(24, 8, None, bias=False),
            modules.Normalize(),
        ],
        {"truncate_dim": 6},
    ),
    "dense": (
        lambda folder: [
            _encode(folder, "t5"),
            _pooled("mean"),
            _dense(32, 16, nn.Tanh()),
            _dense(16, 16, nn.ReLU(), use_residual=True),
        ],
        {},
    ),
    "prompts": (
        lambda folder: [_encode(folder, do_lower_case=True), _pooled("mean")],
        {"prompts": PROMPTS, "default_prompt_name": "query"},
    ),
    "named_prompts": (lambda folder: [_encode(folder), _pooled("mean"), modules.Normalize()], {"prompts": PROMPTS}),
    "layer_norm": (
        lambda folder: [_encode(folder), _pooled("mean"), modules.LayerNorm(32), modules.Dropout(0.5)],
        {"prompts": {"passage": "the cat : "}},
    ),
    "dense_tokens": (
        lambda folder: [
            _encode(folder),
            _dense(32, 16, None, module_input_name="token_embeddings"),
            _pooled("mean", 16),
        ],
        {},
    ),
    "layers": (
        lambda folder: [
            _encode(folder, config_kwargs={"output_hidden_states": True}),
            modules.WeightedLayerPooling(32, 2, 1),
            _pooled("mean"),
        ],
        {},
    ),
    "without_prompt": (
        lambda folder: [
            _encode(folder),
            _pooled(("mean", "weightedmean", "cls", "lasttoken", "max"), include_prompt=False),
        ],
        QUERY,
    ),
    "without_default_prompt": (
        lambda folder: [_encode(folder), _pooled("mean", include_prompt=False)],
        {**QUERY, "default_prompt_name": "query"},
    ),
    "limits": (lambda folder: [_encode(folder, query_length=6, document_length=20), _pooled("mean")], {}),
    "chat": (lambda folder: [_encode(folder, "qwen2", saved=CHAT), _pooled("lasttoken")], QUERY),
    "chat_by_default": (
        lambda folder: [_encode(folder, "qwen2", saved=CHAT), _pooled("mean")],
        {**QUERY, "default_prompt_name": "query"},
    ),
    "static": (
        lambda folder: [
            modules.StaticEmbedding(tokenizer(folder / "tokenizer"), _draw(len(WORDS), 16)),
            modules.Normalize(),
        ],
        QUERY,
    ),
    "bag": (
        lambda folder: [
            modules.BoW(["a", "cat", "DOG", "mat"], {"cat": 2.5, "dog": 0.3}, 0.7),
            _dense(4, 3, nn.Tanh()),
        ],
        QUERY,
    ),
    "bag_once": (lambda folder: [modules.BoW(["a", "cat", "dog"], {"cat": 2.5}, 0.7, False)], {}),
    "words": (lambda folder: [_words(), _pooled(("mean", "mean_sqrt_len_tokens"), 8)], QUERY),
    "word_weights": (
        lambda folder: [_words(), modules.WordWeights(KNOWN, {"cat": 2.0, "dog": 0.5}, 0.7), _pooled("mean", 8)],
        {},
    ),
    "convolved": (lambda folder: [_words(), modules.CNN(8, 6, [1, 3, 5]), _pooled("mean", 18)], {}),
    "recurrent": (lambda folder: [_words(), modules.LSTM(8, 6), _pooled(("mean", "lasttoken"), 12)], {}),
    "clip": (lambda folder: [_towers(folder, modules.CLIPModel), modules.Normalize()], {}),
    "clip_as_saved_now": (
        lambda folder: [_towers(folder, modules.Transformer), _dense(16, 8, None), modules.Normalize()],
        QUERY,
    ),
    "heads": (lambda folder: [_encode(folder), _pooled("mean"), _heads()], {}),
}
SPARSE: dict[str, tuple[Make, dict[str, Any]]] = {
    "splade": (lambda folder: [_scores(folder), sparse.SpladePooling("max")], {}),
    "splade_sum": (
        lambda folder: [_scores(folder), sparse.SpladePooling("sum", "log1p_relu")],
        {**QUERY, "max_active_dims": 5},
    ),
    "ways": (lambda folder: [_ways(folder)], {}),
    "codes": (lambda folder: [_encode(folder), _pooled("mean"), sparse.SparseAutoEncoder(32, 64, k=6, k_aux=6)], {}),
}
SEVERAL: dict[str, tuple[Make, dict[str, Any]]] = {
    "late": (lambda folder: _vectors(folder), QUERY),
    "late_fixed": (lambda folder: _vectors(folder, query_expansion=FIXED), QUERY),
    "late_least": (lambda folder: _vectors(folder, query_expansion=LEAST, document_length=9), QUERY),
}
OLDER = ("older", "oldest")
PYLATE = {
    "model_type": "ColBERT",
    "query_prefix": "[CLS] ",  # a token of its own
    "document_prefix": "the dog ",
    "query_length": 10,
    "document_length": 9,
    "attend_to_expansion_tokens": False,
    "skiplist_words": ["dog"],
}
CHAT = {"chat_template": TEMPLATE}


def get_library(name: str) -> Any:
    """The library's class of a folder."""
    several = name in SEVERAL or name == "pylate"
    return SparseEncoder if name in SPARSE else MultiVectorEncoder if several else SentenceTransformer


def save(name: str, folder: Path) -> None:
    """Write a folder."""
    if name in OLDER:
        return _save_older(folder, nested=name == "oldest")
    if name == "pylate":
        return _save_pylate(folder)
    make, options = (VECTORS | SPARSE | SEVERAL)[name]
    torch.manual_seed(0)
    parts = make(folder)
    for part in parts:
        if not isinstance(part, (modules.Transformer, modules.StaticEmbedding, modules.WordEmbeddings, modules.Router)):
            seeded(part, 1)
    get_library(name)(modules=parts, device="cpu", **options).save(str(folder))
    return None


def _save_encoder(kind: str, folder: Path, **options: Any) -> None:
    seeded(ENCODERS[kind](), 0).eval().save_pretrained(folder)
    tokenizer(folder, **options)


def _save_pylate(folder: Path) -> None:
    """As PyLate's release 1 wrote it: a transformer and a layer for each token; the rest is among the settings."""
    _save_encoder("bert", folder, mask_token="cat")
    dense = seeded(_dense(32, 8, None, bias=False), 1)
    (folder / "1_Dense").mkdir()
    dense.save(str(folder / "1_Dense"))
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    config = {"in_features": 32, "out_features": 8, "bias": False}
    config["activation_function"] = "torch.nn.modules.linear.Identity"
    for path, value in {
        "modules.json": entries,
        "1_Dense/config.json": config,
        "config_sentence_transformers.json": PYLATE,
        "sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False},
    }.items():
        (folder / path).write_text(json.dumps(value))


def save_m3(folder: Path) -> tuple[nn.Linear, nn.Linear]:
    """As BGE-M3's authors lay it out: a folder, and beside it two heads of the tokens."""
    save("cls", folder)
    heads = seeded(nn.Linear(32, 1), 2), seeded(nn.Linear(32, 24), 3)
    for name, head in zip(("sparse", "colbert"), heads, strict=True):
        torch.save(head.state_dict(), folder / f"{name}_linear.pt")
    return heads


def _save_older(folder: Path, *, nested: bool) -> None:
    """As releases 2 to 4 wrote it, and where nested as release 0 did: the transformer in a folder of its own."""
    place = "0_Transformer" if nested else ""
    _save_encoder("bert" if nested else "bert_without_pooler", folder / place)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [
        {"idx": number, "name": str(number), "path": path or place, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": not nested}
    (folder / "1_Pooling").mkdir()
    for path, value in {
        "modules.json": entries,
        "1_Pooling/config.json": {**pooling, "pooling_mode_max_tokens": False},
        f"{place or '.'}/sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False},
    }.items():
        (folder / path).write_text(json.dumps(value))
