"""Short texts to ``/v1/embeddings`` beside infinity: ``python -m bench.texts --infinity PROGRAM --rounds 5``.

``PROGRAM`` is ``bin/infinity_emb`` of an environment with ``infinity-emb[torch,server]==0.0.77``,
``transformers<4.50``, ``sentence-transformers<4`` and ``click<8.2``: newer versions do not fit together.
Both serve one folder of sentence-transformers with the seeded weights of a MiniLM (6 layers, 384 channels). Rounds
alternate; CPU time is that of all processes of a server.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from bench.serving.client import Ask, Connection, Figures, Sending, loaded
from bench.serving.server import Server, running
from bench.startup import HOST, LAYERTAP, free_port

NAME = "minilm"
TEXTS, WORDS, VOCABULARY = 64, 10, 2000  # with the two special tokens a text has 12 tokens
CLOSE = 1e-4
JSON = "application/json"
PARTS = ("Transformer", "Pooling", "Normalize")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.texts", description=__doc__)
    parser.add_argument("--infinity", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--json", type=Path, help="where figures of each round are written")
    chosen = parser.parse_args()
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        bodies = write_bodies(folder)
        save_model(folder / NAME)
        servers = {
            each: stack.enter_context(running(*start, folder / each))
            for each, start in _commands(folder, chosen.infinity)
        }
        vectors = {each: _ask(server, PATHS[each], bodies[0]) for each, server in servers.items()}
        difference = float(np.abs(vectors["server"] - vectors["infinity"]).max())
        if not difference <= CLOSE:
            sys.exit(f"the two vectors differ by {difference:.2g}")
        rounds: list[dict[str, Figures]] = []
        for _ in range(chosen.rounds):
            sendings = {
                each: Sending([PATHS[each]], bodies, chosen.connections, chosen.seconds, JSON) for each in servers
            }
            rounds.append({each: loaded(server, sendings[each]) for each, server in servers.items()})
    _print(rounds)
    if chosen.json:
        chosen.json.write_text(json.dumps({"difference": difference, "rounds": rounds}, indent=2) + "\n")


def write_bodies(folder: Path) -> list[Path]:
    """A file for each text's request."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(TEXTS):
        text = " ".join(f"w{each}" for each in generator.integers(VOCABULARY, size=WORDS))
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps({"model": NAME, "input": text}))
    return paths


def save_model(folder: Path) -> None:
    """A folder as sentence-transformers 3 wrote them, which both servers read."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=256, **special).save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # infinity's version of transformers knows the class by its older name
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    parts = [f"{number}_{kind}" if number else "" for number, kind in enumerate(PARTS)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(parts, PARTS, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    (folder / parts[1]).mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / parts[1] / "config.json").write_text(json.dumps(pooling))


def _commands(folder: Path, program: Path) -> list[tuple[str, tuple[list[str], int]]]:
    """What starts each server, and its port."""
    ours, theirs = free_port(), free_port()
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump({"models": [{"name": NAME, "source": f"transformers:{folder / NAME}"}]}))
    for name in PATHS:
        (folder / name).mkdir()
    infinity = [str(program), "v2", "--model-id", str(folder / NAME), "--served-model-name", NAME, "--device", "cpu"]
    infinity += ["--engine", "torch", "--no-bettertransformer", "--dtype", "float32", "--log-level", "warning"]
    return [
        ("server", ([*LAYERTAP, "serve", "--host", HOST, "--port", str(ours), "--config", str(config)], ours)),
        ("infinity", ([*infinity, "--host", HOST, "--port", str(theirs)], theirs)),
    ]


def _ask(server: Server, path: str, body: Path) -> np.ndarray:
    """The vector of a text, once the server answers."""
    server.until("POST", path, body.read_bytes(), {"Content-Type": JSON})
    answer = Connection(server.port).post(Ask(path, body.read_bytes(), JSON))
    return np.asarray(json.loads(answer.body)["data"][0]["embedding"])


def _print(rounds: list[dict[str, Figures]]) -> None:
    table = Table("", "texts a second", "CPU-ms a text", "p50 ms", "p99 ms")
    for name in PATHS:
        keys = ("per_s", "cpu_ms", "p50_ms", "p99_ms")
        table.add_row(name, *(f"{median(each[name][key] for each in rounds):.1f}" for key in keys))
    Console().print(table)
    for key in ("per_s", "cpu_ms"):
        ratios = sorted(each["server"][key] / each["infinity"][key] for each in rounds)
        print(f"{key}: server to infinity {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


PATHS = {"server": "/v1/embeddings", "infinity": "/embeddings"}

if __name__ == "__main__":
    main()
