"""The forward of a sentence-transformers folder: the library's modules, run after a transformer or alone.

They pass on a dictionary of features. Here each returns only those that it changes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYER, TOKENS, IDS, MASK = "sentence_embedding", "token_embeddings", "input_ids", "attention_mask"
LENGTHS, ALL_LAYERS = "sentence_lengths", "all_layer_embeddings"
PROMPT, EXPANSION, TASK = "prompt_mask", "query_expansion_positions", "task"
TASKS = (None, "query", "document")  # of the library
NO_MARK, PROMPT_MARK, EXPANSION_MARK, EMPTY_MARK = MARKS = (0, 1, 2, 3)  # of a token; the last: of a text without any
Features = dict[str, Any]
Run = Callable[..., Features]


def count_marks() -> int:
    """How many ids stand for each token: an id says also what else the library knows of a token and its text.

    Id + vocabulary * (4 * task + mark), by the index of its task.
    """
    return len(TASKS) * len(MARKS)


def mark_tokens(ids: Sequence[int], marks: Sequence[int], task: str | None, vocabulary: int) -> list[int]:
    """The ids of tokens with their marks and the task of their text."""
    of_task = len(MARKS) * TASKS.index(task)
    return [each + vocabulary * (of_task + mark) for each, mark in zip(ids, marks, strict=True)]


class FinalEmbedding(nn.Module):
    """The last layer: (N, C) → the first ``dimensions`` of it, of which at most ``active`` are not 0; None: all."""

    def __init__(self, dimensions: int | None, active: int | None) -> None:
        super().__init__()
        self.dimensions, self.active = dimensions, active
        self.select: Any = importlib.import_module("sentence_transformers.util").select_max_active_dims

    def forward(self, value: Tensor) -> Tensor:
        """(N, C) → (N, D)."""
        chosen: Tensor = value[:, : self.dimensions]
        return chosen if self.active is None else self.select(chosen, self.active)


class FinalTokens(nn.Module):
    """The last layer of a model with a vector for each token: those that do not count are 0."""

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        """(N, T, D) and (N, T) → (N, T, D)."""
        return value * mask.unsqueeze(-1).to(value.dtype)


class TokenWeights(nn.Module):
    """BGE-M3's sparse head: each id's largest weight among a text's tokens; special ids have none."""

    def __init__(self, linear: nn.Linear, vocabulary: int, special: Sequence[int]) -> None:
        super().__init__()
        self.linear, self.vocabulary, self.special = linear, vocabulary, tuple(special)

    def forward(self, tokens: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """(N, T, C), (N, T) and (N, T) → (N, vocabulary)."""
        weights = self.linear(tokens).squeeze(-1).relu() * mask.to(tokens.dtype)
        for special in self.special:
            weights = weights.masked_fill(ids == special, 0)
        largest: Tensor = weights.new_zeros(len(ids), self.vocabulary).scatter_reduce(1, ids, weights, "amax")
        return largest


class TokenVectors(nn.Module):
    """BGE-M3's head for late interaction: a normalised vector for each token except the first."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, tokens: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """(N, T, C), (N, T) and (N, T) → (N, T, D), 0 for the first token and padding."""
        kept = mask * (torch.arange(ids.shape[1], device=ids.device) > 0)
        vectors: Tensor = functional.normalize(self.linear(tokens), dim=-1) * kept.unsqueeze(-1).to(tokens.dtype)
        return vectors


class HiddenStates(nn.Module):
    """Stub for a transformer inside another module: its output is among the features already."""

    def forward(self, features: Features) -> Features:
        """No feature changes."""
        return {}


class SentenceModel(nn.Module):
    """A folder's modules without a transformer; ids from ``vocabulary`` on are no tokens, and become ``pad``."""

    def __init__(self, parts: Mapping[str, nn.Module], final: nn.Module, vocabulary: int, pad: int) -> None:
        super().__init__()
        self.vocabulary, self.pad, self.names = vocabulary, pad, tuple(parts)
        add_parts(self, parts, final)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Features:
        """(N, T), twice → the embedding by its name."""
        outside = input_ids >= self.vocabulary
        mask = attention_mask.masked_fill(outside, 0)
        features = {IDS: input_ids.masked_fill(outside, self.pad), MASK: mask, LENGTHS: mask.sum(1)}
        return finish(self, run_parts(self, self.names, features))


def add_parts(module: nn.Module, parts: Mapping[str, nn.Module], final: nn.Module) -> None:
    """Add a folder's modules, and the last layer under the name of what it returns."""
    for name, part in parts.items():
        module.add_module(name, part)
    module.add_module(TOKENS if isinstance(final, FinalTokens) else LAYER, final)


def run_parts(module: nn.Module, names: Sequence[str], features: Features) -> Features:
    """The features after these modules. One that depends on the task runs for each, and each row gets its own."""
    for name in names:
        part: Any = module._modules[name]
        ways: tuple[str | None, ...] | None = getattr(part, "ways", None)
        if ways is None:
            features = features | part(features)
            continue
        tasks = features.get(TASK, features[MASK].new_zeros(len(features[MASK])))
        by_way = {way: features | part(features, task=way) for way in dict.fromkeys(ways)}
        chosen = by_way[ways[0]]
        for number, way in enumerate(ways):
            if way != ways[0]:
                other = by_way[way]
                chosen = {
                    key: _select(tasks == number, other[key], each) for key, each in chosen.items() if key in other
                }
        features = chosen
    return features


def _select(rows: Tensor, one: Any, other: Any) -> Any:
    return one if one is other else torch.where(rows.view(-1, *(1,) * (one.ndim - 1)), one, other)


def finish(module: Any, features: Features) -> Features:
    """What a forward returns of the features."""
    if LAYER in module._modules:
        return {LAYER: module.sentence_embedding(features[LAYER])}
    return {TOKENS: module.token_embeddings(features[TOKENS], features[MASK]), "token_mask": features[MASK]}


def attach_parts(
    module: Any,
    parts: Mapping[str, nn.Module],
    final: nn.Module,
    outputs: Mapping[str, tuple[tuple[str, ...], str]],
    heads: Mapping[str, nn.Module],
    *,
    all_layers: bool,
    vocabulary: int | None,
    attends: bool,
) -> None:
    """Make a transformer's forward run the folder's other modules, and return their embedding with its own output.

    ``outputs``: by the name of an input, the path of what the modules read in the transformer's output, and its name
    among the features. ``heads``: what else is made of it, by name. ``all_layers``: the modules get the hidden states
    of all layers too. ``vocabulary``: if ids have marks. ``attends``: whether other tokens attend to those that expand
    a query.
    """
    base: Any = type(module)
    parameters, names = list(inspect.signature(module.forward).parameters), tuple(parts)
    further = tuple(heads)
    more = {"output_hidden_states": True} if all_layers else {}

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Features:
        rows = {**dict(zip(parameters, args, strict=False)), **kwargs}
        features: Features = {}
        if vocabulary is not None and IDS in rows:
            marks = rows[IDS] // vocabulary
            rows[IDS] = rows[IDS] % vocabulary
            kinds = marks % len(MARKS)
            features = {TASK: marks[:, 0] // len(MARKS), PROMPT: kinds == PROMPT_MARK}
            features[EXPANSION] = kinds == EXPANSION_MARK
            empty = kinds == EMPTY_MARK
            if not attends:
                rows[MASK] = rows[MASK].masked_fill(features[EXPANSION], 0)
        output = base.forward(self, **rows, **more)
        found = [each for name, each in outputs.items() if name in rows]
        if len(found) != 1:  # both towers
            return output  # type: ignore[no-any-return]
        ((path, name),) = found
        value = functools.reduce(lambda outer, key: outer[key], path, output)
        features |= rows | {name: value}
        if TASK in features:
            features[MASK] = rows[MASK].masked_fill(empty, 0)
        if all_layers:
            features[ALL_LAYERS] = output["hidden_states"]
            output = {key: each for key, each in output.items() if key != "hidden_states"}
        result = {**output, **finish(self, run_parts(self, names, features))}
        return result | {key: self._modules[key](value, rows[IDS], rows[MASK]) for key in further}

    if all_layers:  # at the first forward the library would install hooks, and later not know that it has
        with suppress(AttributeError, TypeError):  # a class that collects them by itself
            importlib.import_module("transformers.utils.output_capturing").maybe_install_capturing_hooks(module)
    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    add_parts(module, parts, final)
    for name, head in heads.items():
        module.add_module(name, head)


def _run_changed(kind: Any, part: Any, features: Features, **options: Any) -> Features:
    changed = kind.forward(part, dict(features), **options)
    return {
        name: value for name, value in changed.items() if isinstance(value, Tensor) and value is not features.get(name)
    }


def _run_router(kind: Any, part: Any, features: Features, task: str | None = None) -> Features:
    """The library's forward, whose modules return only what they change."""
    changed: Features = {}
    route: Any = part.sub_modules[part._resolve_route(task, "text")]
    for module in route:
        given = {"task": task} if "task" in getattr(module, "forward_kwargs", ()) else {}
        changed |= module({**features, **changed}, **given)
    return changed


def _run_pooling(kind: Any, part: Any, features: Features) -> Features:
    """Tokens of the prompt are left out if the folder says so, for each text by itself."""
    if not part.include_prompt and PROMPT in features:
        features = features | {MASK: features[MASK] * (1 + features[PROMPT].long()), "prompt_length": 1}
    return {LAYER: kind.forward(part, dict(features))[LAYER]}


def exclude_prompt(mask: Tensor, prompt_length: int) -> Tensor:
    """The mask without the tokens of a prompt, at which it is 2."""
    return (mask == 1).to(mask.dtype)


def _run_static(kind: Any, part: Any, features: Features) -> Features:
    """Texts of several lengths in one matrix: the padding is a row of the table that counts nowhere."""
    ids = features[IDS].masked_fill(features[MASK] == 0, part.embedding.padding_idx)
    return {LAYER: kind.forward(part, {IDS: ids, "offsets": None})[LAYER]}


def _run_words(kind: Any, part: Any, features: Features) -> Features:
    tokens = [ids[kept].tolist() for ids, kept in zip(features[IDS], features[MASK].bool(), strict=True)]
    return {LAYER: part.get_sentence_features(tokens)[LAYER].to(features[IDS].device)}


def _run_lstm(kind: Any, part: Any, features: Features) -> Features:
    """Padded to the length of the mask: the library cuts what no text of a batch fills."""
    tokens: Tensor = kind.forward(part, dict(features))[TOKENS]
    return {TOKENS: functional.pad(tokens, (0, 0, 0, features[MASK].shape[1] - tokens.shape[1]))}


def _run_coder(kind: Any, part: Any, features: Features) -> Features:
    """Only the codes: outside of inference mode the library also decodes them, for training."""
    return {LAYER: kind.forward(part, dict(features))[LAYER]}


RUNS: dict[str, Run] = {
    "Router": _run_router,
    "Pooling": _run_pooling,
    "StaticEmbedding": _run_static,
    "BoW": _run_words,
    "LSTM": _run_lstm,
    "SparseAutoEncoder": _run_coder,
}


def make_forward(kind: Any) -> Run:
    """The forward of one of the library's classes, which returns only the features that it changes."""
    run: Run = RUNS.get(kind.__name__, _run_changed)

    def forward(self: Any, features: Features, **options: Any) -> Features:
        return run(kind, self, features, **options)

    return forward
