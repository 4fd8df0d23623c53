"""Write a tiny cross-encoder with random weights, and a configuration that serves it, into a folder.

.venv/bin/python examples/tiny_reranker.py out/reranker
"""

from __future__ import annotations

import sys
from pathlib import Path
from string import ascii_lowercase

import torch
import transformers

CONFIGURATION = """
models:
  - name: reranker
    source: transformers:model
    device: cpu
aliases: {rerank: reranker}
"""


def main(folder: Path) -> None:
    """Write both; the tokenizer knows letters only."""
    pieces = [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces])}
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    transformers.BertTokenizer(vocab=words).save_pretrained(folder / "model")
    (folder / "models.yaml").write_text(CONFIGURATION, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
