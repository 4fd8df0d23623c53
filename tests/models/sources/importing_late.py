"""A factory is the first to import transformers: ``python -m tests.models.sources.importing_late``."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from layertap.models.sources import build
from layertap.models.spec import InputSpec, ModelSpec

TINY: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def made_beside() -> nn.Module:
    """A model that another thread makes while this one leaves the weights of its own untied, as loading does."""
    from transformers import LlamaConfig, LlamaForCausalLM, initialization

    with initialization.no_tie_weights(), ThreadPoolExecutor(1) as pool:
        return pool.submit(LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)).result()


if __name__ == "__main__":
    assert "transformers" not in sys.modules
    source = "python:tests.models.sources.importing_late:made_beside"
    module: Any = build.build_model(
        ModelSpec("m", source, "DEFAULT", device="cpu", inputs=(InputSpec("x", (4,)),))
    ).module
    assert module.lm_head.weight is module.get_input_embeddings().weight
