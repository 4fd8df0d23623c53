"""Every model type of the installed transformers as a tiny seeded model, with rows that its forward takes.

Configurations are filled by the names of their fields: no type has figures of its own.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

Rows = dict[str, Tensor]
VOCABULARY, HIDDEN, HEADS, LAYERS, SIDE, PATCH = 40, 32, 4, 2, 32, 8
TOKENS = (5, 24)  # ids of plain words, from, up to
LONG, SHORT = 12, 7
LARGEST = 60_000_000  # parameters
WORDS = r"(.*_)?vocab_size(_per_layer_input)?|n_vocab"
KEY_HEADS = r"num_kv_heads|(.*_)?num_key_value_heads|n_head_kv|num_kv_group"
DEPTH = r"n_layers?|(num_)?(en|de)coder_layers|num_layers|depth|(.*_)?num_hidden_layers|(vision|text)_layers|num_blocks"
CHOSEN = r"num_experts_per_(tok|token)|moe_topk|moe_k|top_k|top_k_experts|router_top_k|experts_per_token"
SIDES = r"image_size|pretrain_image_size|img_size"
FIGURES: dict[str, Any] = {
    WORDS: VOCABULARY,
    r"(.*_)?hidden_size|hidden_dim|d_model|n_embd|dim|(.*_)?embed_dim|embedding_size|embedding_dim": HIDDEN,
    r"entity_emb_size|emb_dim|projection_dim|(.*_)?projector_hidden_size|(encoder|attention)_hidden_(dim|size)": HIDDEN,
    r"lm_head_dim|word_embed_proj_dim|out_hidden_size|output_hidden_size|project_dim|pooler_output_size": HIDDEN,
    r"true_hidden_size|hidden_size_per_layer_input|(.*_)?output_dim|proj_dim|text_embed_dim|vision_embed_dim": HIDDEN,
    r"intra_bottleneck_size": HIDDEN,
    r"num_attention_heads|n_heads?|num_heads|(.*_)?attention_heads|(.*_)?num_attention_heads|nhead": HEADS,
    KEY_HEADS: 2,
    DEPTH: LAYERS,
    r"head_dim|d_kv|attention_head_dim|attention_head_size|(.*_)?head_dim|dim_head|kv_channels": 8,
    r"qk_head_dim": 16,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim|index_head_dim": 8,
    r"[qok]v?_lora_rank|.*_low_rank_dim": 16,
    r"index_n_heads|index_num_heads": 4,
    r"index_topk": 64,
    r"(.*_)?intermediate_size|(.*_)?ffn_dim|(.*_)?mlp_dim|(.*_)?ffn_hidden_size|n_inner|d_ff|dff|intermediate_dim": 48,
    r"moe_intermediate_size|shared_expert_intermediate_size": 16,
    r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|max_target_positions|context_length": 64,
    r"position_buckets": 16,
    r"max_source_positions": 50,
    r"num_experts|n_routed_experts|(.*_)?num_experts|num_local_experts|moe_num_experts": 4,
    CHOSEN: 2,
    r"n_group|topk_group|num_expert_group": 1,
    SIDES: SIDE,
    r"patch_size": PATCH,
    r"num_queries|num_query_tokens|num_labels": 4,
    r"sliding_window|window_size|attention_window|local_attention|sliding_window_size": 4,
    r"num_mel_bins|feature_size|input_feat_per_channel": 16,
    r"num_frames": 2,
    r"(linear_)?(num_)?(key|value)_heads|linear_num_(key|value)_heads": 2,
    r"linear_(key|value)_head_dim": 8,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_head|mamba_head_dim": 8,
    r"mamba_n_groups|n_groups": 1,
    r"mamba_chunk_size|chunk_size": 8,
    r"mamba_d_state|state_size|ssm_state_size": 8,
    r"prediction_length": 4,
    r"num_conv_pos_embeddings": 8,
    r"num_conv_pos_embedding_groups": 2,
}
KEPT = ((WORDS, DEPTH, SIDES), (WORDS, DEPTH), (WORDS,))
ALIKE = {KEY_HEADS: HEADS, CHOSEN: 1}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PER_LAYER = ("mlp_layer_types", "indexer_types", "layers_block_type", "attention_layers")
NEEDED = ("head_dim", "n_inner", "vocab_size", "prediction_length")
NEEDED_ALIKE = ("sliding_window", "num_key_value_heads", "hidden_size")
WIDTHS, STAGE_HEADS = (16, 32, 64, 128), (2, 4, 8, 16)
STAGES = {
    **dict.fromkeys(("num_heads", "num_attention_heads"), STAGE_HEADS),
    **dict.fromkeys(("hidden_sizes", "embed_dim", "embed_dims", "hidden_dims", "out_hidden_sizes"), WIDTHS),
    **dict.fromkeys(("depths", "depth"), (2, 2, 2, 2)),
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
SCALES = (0.3, 0.1, 0.02)  # of weights: the first that keeps every number finite


def list_model_types() -> list[str]:
    """All names of the library's configurations."""
    return sorted(CONFIG_MAPPING)


@dataclass(frozen=True)
class Trial:
    """One way to fill a configuration: how many layers, whether by all figures, and what goes with fewer heads."""

    layers: int
    kept: int = 0  # how much the library's own figures are kept: not at all, widths, all but vocabulary and layers
    alike: bool = False  # as many heads of keys as of queries, one expert, and what is None filled too

    def fill(self, kind: type[Any]) -> dict[str, Any]:
        """Figures for a class's fields, those of its parts too."""
        try:
            defaults = kind().to_dict()
        except Exception:
            defaults = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
        own = self
        kinds = defaults.get("layer_types")
        filled: dict[str, Any] = {}
        if isinstance(kinds, list) and kinds and all(isinstance(each, str) for each in kinds):
            unique = list(dict.fromkeys(kinds))
            own = replace(self, layers=max(self.layers, len(unique)))
            filled["layer_types"] = (unique * own.layers)[: own.layers]
        for name, value in defaults.items():
            figure = own._fill_part(kind, name, value) if name in kind.sub_configs else own._find_figure(name, value)
            if figure is not ...:
                filled.setdefault(name, figure)
        rope = defaults.get("rope_parameters") or {}
        if self.alike and "rope_parameters" in defaults:
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": None}
        if "mrope_section" in rope:
            filled["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
        if "backbone_config" in defaults and not isinstance(filled.get("backbone_config"), dict):
            filled |= {"backbone_config": RESNET, "use_timm_backbone": False, "backbone": None}
        elif "neck_hidden_sizes" in defaults and "backbone_config" in filled:
            filled["backbone_config"] |= {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
        return filled

    def _fill_part(self, kind: type[Any], name: str, value: Any) -> Any:
        part = kind.sub_configs[name]
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            part = CONFIG_MAPPING[value["model_type"]]
        if value is None or part.__name__ == "AutoConfig" or "timm" in part.model_type:
            return ...
        return {**self.fill(part), "model_type": part.model_type}

    def _find_figure(self, name: str, value: Any) -> Any:
        if name in IDS:
            return IDS[name] if value is not None or self.alike else ...
        if re.fullmatch(r".*_token_(id|index)|.*_token_id_.*", name) and isinstance(value, int):
            return TOKENS[1] + sum(map(ord, name)) % (VOCABULARY - TOKENS[1])
        if isinstance(value, list) and name in PER_LAYER:
            return value[:1] * self.layers
        if isinstance(value, list) and not self.kept and len(value) <= len(STAGES.get(name, ())):
            return list(STAGES[name][: len(value)])
        if self.alike and value is None and name == "layer_types":
            return ["full_attention"] * self.layers
        fills = value is None and (name in NEEDED or (self.alike and name in NEEDED_ALIKE))
        if isinstance(value, bool) or not (isinstance(value, int) or fills):
            return ...
        for pattern, figure in FIGURES.items():
            if re.fullmatch(pattern, name):
                if self.kept and pattern not in KEPT[self.kept - 1]:
                    return ...
                if self.alike and pattern in ALIKE:
                    return ALIKE[pattern]
                return self.layers if pattern == DEPTH else figure
        return ...


TRIALS = (
    *(Trial(layers, alike=alike) for alike in (False, True) for layers in (LAYERS, 4)),
    *(Trial(LAYERS, kept) for kept in (1, 2)),
)


def make_configs(kind: type[Any]) -> Iterator[Any]:
    """Configurations of one class, tiny ones first; the last has the library's own figures but for the layers."""
    last: Exception | None = None
    for trial in TRIALS:
        try:
            yield kind(**trial.fill(kind))
        except Exception as error:  # figures that do not go together
            last = last or error
    if last is not None:
        raise last


def find_class(kind: type[Any]) -> type[Any] | None:
    """The class of a configuration's models: AutoModel's, else the first of its module that has this configuration."""
    try:
        found = MODEL_MAPPING[kind]
        return found[0] if isinstance(found, tuple) else found
    except KeyError:
        pass
    name = kind.__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    for each in vars(module).values():
        if (
            isinstance(each, type)
            and issubclass(each, transformers.PreTrainedModel)
            and each.config_class is kind
            and each.__module__ == name
            and "forward" in vars(each)
        ):
            return each
    return None


def build(kind: type[Any], seed: int = 0) -> Iterator[Any]:
    """Models of a configuration's class in eval mode, eager, with seeded weights."""
    architecture = find_class(kind)
    if architecture is None:
        raise LookupError("no class")
    last: Exception | None = None
    for config in make_configs(kind):
        try:
            config._attn_implementation = "eager"
            config.use_cache = False
            with torch.device("meta"):
                size = sum(each.numel() for each in architecture(config).parameters())
            if size > LARGEST:
                raise MemoryError(f"{size} parameters")
            torch.manual_seed(seed)
            module = architecture(config)
        except Exception as error:
            last = last or error
            continue
        yield module.eval().requires_grad_(False)
    if last is not None:
        raise last


def seed_weights(module: nn.Module, scale: float, seed: int = 0) -> None:
    """Weights normal(0, ``scale``), norms and biases a little off."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in sorted(module.named_parameters()):
        noise = torch.randn(value.shape, generator=generator).to(value.dtype)
        if value.ndim > 1 or "sink" in name:
            value.copy_(noise * scale * min(1.0, math.sqrt(HIDDEN / max(math.prod(value.shape[1:]), 1))))
        else:
            value.add_(noise * scale / 3)


def make_rows(module: Any, length: int = LONG, seed: int = 0) -> Iterator[Rows]:
    """Two rows for a forward, in the order in which they are worth a trial."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    def ids(size: int) -> Tensor:
        return torch.randint(*TOKENS, (2, size), generator=generator)

    names = inspect.signature(module.forward).parameters
    config, main = module.config, module.main_input_name
    text: Rows = {}
    if "input_ids" in names:
        text["input_ids"] = ids(length)
        if "attention_mask" in names:
            text["attention_mask"] = torch.ones(2, length, dtype=torch.int64)
    elif "decoder_input_ids" in names and main == "input_ids":
        text["decoder_input_ids"] = ids(length)
    decoder = {"decoder_input_ids": ids(6)} if "decoder_input_ids" in names else {}
    if (text and main == "input_ids") or main not in names:
        if "pixel_values" in names and hasattr(type(module), "get_image_features"):
            for picture in _make_pictures(config, noise):
                yield {**text, **picture}
        if text:
            yield {**text, **decoder}
            yield text
            if "bbox" in names:
                box = torch.randint(0, 30, (2, length, 2), generator=generator)
                yield {**text, "bbox": torch.cat([box, box + 5], -1)}
    if "pixel_values" in names:
        for picture in _make_pictures(config, noise):
            yield {**picture, **decoder}
            yield {**picture, **text}
    if "pixel_values_videos" in names:
        for picture in _make_pictures(config, noise):
            yield {"pixel_values_videos": picture["pixel_values"]}
    for name in ("input_features", "input_values", main):
        if name in names and name not in ("input_ids", "pixel_values"):
            mel = next(
                (
                    getattr(config, each)
                    for each in ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
                    if hasattr(config, each)
                ),
                16,
            )
            frames = 2 * getattr(config, "max_source_positions", 50) if name == "input_features" else 100
            for shape in (
                (mel, frames),
                (frames, mel),
                (1600,),
                (1, 1600),
                (frames * 2, mel),
                (length, HIDDEN),
                (1024, 128),
                (64, 7),
                (1, 1001, 64),
            ):
                if isinstance(mel, int):
                    for extra in (decoder, {}) if decoder else ({},):
                        yield {name: noise(*shape), **extra}
                        if text and "input_ids" in text:
                            yield {name: noise(*shape), **text}
    for name in ("hidden_states", "inputs_embeds"):
        if name in names:
            yield {name: noise(length, HIDDEN)}


def _make_pictures(config: Any, noise: Any) -> Iterator[Rows]:
    parts = [each for each in (getattr(config, "vision_config", None), config) if each is not None]
    vision = next((each for each in parts if getattr(each, "image_size", None) is not None), parts[0])
    channels, side = (
        getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3),
        getattr(vision, "image_size", None),
    )
    channels = channels if isinstance(channels, int) else 3
    sides = [tuple(side)] if isinstance(side, (list, tuple)) else [(side, side)] if isinstance(side, int) else []
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    for size in [*sides, (SIDE, SIDE), (64, 64), (224, 224)]:
        if isinstance(frames, int):
            yield {"pixel_values": noise(frames, channels, *size)}
        yield {"pixel_values": noise(channels, *size)}
