"""Tiny models of every class of transformers that takes texts, by figures that fit most configurations."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

MAPPINGS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
MAX_PARAMETERS = 8_000_000
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
# The first pattern that a field's whole name fits gives its value; what fits none keeps its default.
FIGURES: dict[str, Any] = {
    r"chunk_size_feed_forward|type_vocab_size|mamba_chunk_size|time_step_rank": None,
    r"n_groups?|topk_group|.*_n_groups": None,
    r"(.*_)?vocab_size(_.*)?|n_vocab": 40,
    r"n_shared_experts|num_shared_experts|(.*_)?(first_k_dense_replace|num_nextn_predict_layers)": None,
    r"num_experts_per_tok|.*top_?k|moe_k": 2,
    r"(.*_)?(n_|num_)(.*_)?experts|zero_expert_num": 4,
    r"(num_|n_)?((hidden|encoder|decoder|num_encoder|num_decoder)_)?layers?|num_hidden_layers": 2,
    r".*(key_value_heads|kv_heads)|num_query_groups": 2,
    r"mamba_n(um)?_heads|mamba_num_heads|mamba_d_head|mamba_headdim|mamba_head_dim": 8,
    r"(.*_)?(num|n)(_.*)?_heads?|num_heads|n_head|attention_heads|(.*_)?attention_heads|swa_num_attention_heads": 4,
    r"qk_head_dim": 16,
    r"(.*_)?head_dim|head_dim|d_kv|d_head|dim_head|.*head_size|kv_channels|index_head_dim|v_head_dim|rotary_dim": 8,
    r".*_rank|rank": 8,
    r"(.*_)?(intermediate|ffn|ff|feed_forward|inner|dff|ffn_hidden)(_.*)?|d_ff|dim_ff|n_inner|dff|hidden_dim": 48,
    r"state_size|.*state_size|mamba_d_state|.*rel_pos_bins|d_rel": 8,
    r"hidden_size_per_layer_input": 8,
    r"(.*_)?(hidden_size|embed_proj_dim|embedding_size|pooler_hidden_size|embed_dim)": 32,
    r"d_model|n_embd|dim|emb_dim|embedding_dim|lru_width|d_latents|mamba_d_ssm|prediction_head_size": 32,
    r"(.*_)?max_(.*_)?position_embeddings|n_positions|n_ctx|context_length|max_length|model_max_length|seq_length": 64,
    r"max_seq(uence)?_len(gth)?|max_source_positions|max_target_positions|original_max_position_embeddings": 64,
    r"sliding_window(_size)?|local_attention|attention_window(_size)?|attention_chunk_size|window_size": 8,
    r"block_size|chunk_size|(local|lsh)_attn_chunk_length|local_radius|global_block_size": 4,
    r"intra_bottleneck_size|true_hidden_size": 32,
    r"query_pre_attn_scalar": 8,
}
# Where figures do not fit together, these take the place of some, one group after another.
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
    {"head_dim": 16},
    {"num_hidden_layers": 4},
    {"layer_types": None, "mlp_layer_types": None},
)


# What single configurations want besides.
EXTRAS: dict[str, dict[str, Any]] = {
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 2, "hash_seed": 1},
    "SqueezeBertConfig": dict.fromkeys(
        ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), 2
    ),
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "EsmConfig": {"vocab_size": 40, "mask_token_id": 1, "position_embedding_type": "rotary"},
    "XmodConfig": {"default_language": "en_XX"},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "LiltConfig": {"channel_shrink_ratio": 4, "max_2d_position_embeddings": 64, "hidden_size": 48},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    **{name: {"num_key_value_heads": 4} for name in ("DeepseekV32Config", "Glm5NextTextConfig", "Dots3NoteTextConfig")},
    **{name: {"num_kv_shared_layers": 0} for name in ("Gemma3nTextConfig", "Gemma4TextConfig")},
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        for name in (
            *("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Qwen2_5OmniTextConfig"),
            *("Glm4vTextConfig", "GlmOcrTextConfig", "GlmImageTextConfig"),
        )
    },
    "Dots1Config": {"n_shared_experts": 1, "n_routed_experts": 4},
}


def list_classes() -> list[str]:
    """The names of all classes of the auto mappings, each once."""
    found = [names for mapping in MAPPINGS for names in getattr(modeling_auto, mapping).values()]
    return list(dict.fromkeys(name for names in found for name in ((names,) if isinstance(names, str) else names)))


def takes_texts(name: str) -> bool:
    """Whether a class of the library takes ids of tokens before all else."""
    try:
        whole = getattr(transformers, name)
        return whole.main_input_name == "input_ids" and "input_ids" in inspect.signature(whole.forward).parameters
    except (AttributeError, ImportError):  # of a package that is not there
        return False


def build(name: str) -> Any:
    """A seeded model in eval mode; the last error of all attempts where none fits."""
    whole, errors = getattr(transformers, name), []
    for others in OTHERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = whole.config_class(**_fill(whole.config_class, others))
                with torch.device("meta"):
                    count = sum(value.numel() for value in whole(config).parameters())
                if count > MAX_PARAMETERS:
                    raise ValueError(f"{count} parameters")
                torch.manual_seed(1)
                module = whole(config).eval()
                with torch.no_grad():
                    for parameter in module.parameters():
                        if parameter.ndim > 1 and parameter.is_floating_point():
                            parameter.normal_(0, 0.3)
                    for part in module.modules():
                        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                            part.weight[part.padding_idx] = 0  # as training leaves it
                run(module, {"input_ids": torch.arange(4, 11)[None]})
            return module
        except Exception as failure:
            errors.append(failure)
    raise errors[0]


def run(module: Any, rows: dict[str, torch.Tensor]) -> Any:
    """What a model returns for ids and their mask, of two towers that of texts; a decoder is given the same ids."""
    further = {"use_cache": False, "decoder_input_ids": rows["input_ids"]}
    with torch.no_grad():
        if hasattr(module, "get_text_features"):
            return module.get_text_features(**_select(module.get_text_features, rows))
        return module(**_select(module.forward, rows | further))


def _select(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values that a function takes."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in takes}


def _fill(kind: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a configuration and of those within it."""
    own = kind()
    defaults = {**own.to_dict(), **{name: getattr(own, name, None) for name in getattr(kind, "sub_configs", {})}}
    filled: dict[str, Any] = {}
    for name in inspect.signature(kind.__init__).parameters:
        value = defaults.get(name)
        if name in getattr(kind, "sub_configs", {}):
            if value is not None:
                filled[name] = {**_fill(type(value), others), "model_type": value.model_type}
        elif name in others:
            filled[name] = others[name]
        elif name in IDS:
            filled[name] = IDS[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= 40:
            filled[name] = 5
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            filled[name] = {**value, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
            filled["head_dim"] = 8
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list) and value:
            filled[name] = (list(dict.fromkeys(value)) * 2)[: max(2, len(set(value)))]
        elif value is None or (isinstance(value, int) and not isinstance(value, bool)):
            figure = next((number for pattern, number in FIGURES.items() if re.fullmatch(pattern, name)), None)
            if figure is not None and (value is not None or figure in (2, 4, 8)):
                filled[name] = figure
    types = [filled[name] for name in ("layer_types", "layers_block_type") if filled.get(name)]
    if types:
        filled["num_hidden_layers"] = len(types[0])
        if filled.get("mlp_layer_types"):
            filled["mlp_layer_types"] = (filled["mlp_layer_types"] * 4)[: len(types[0])]
    return filled | EXTRAS.get(kind.__name__, {})
