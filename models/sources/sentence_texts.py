"""How a sentence-transformers folder takes texts: prompts, tasks, chat templates, and tokenizers of its modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

from layertap.models.errors import LoadError
from layertap.models.inputs.model_inputs import Encode, TextSpec
from layertap.models.sources.sentence_folder import SentenceFolder
from layertap.models.sources.sentence_model import (
    EMPTY_MARK,
    EXPANSION_MARK,
    IDS,
    MASK,
    NO_MARK,
    PROMPT_MARK,
    TASKS,
    SentenceModel,
    count_marks,
    mark_tokens,
)
from layertap.models.spec import Truncate

Encoded = tuple[list[int], int]
# By a prompt's name, as ``encode_query`` and ``encode_document`` have them.
PROMPT_TASKS = {"query": "query", "document": "document", "passage": "document", "corpus": "document"}
MAX_TOKENS = 2**17  # of a text, for modules without a limit


def complete_texts(text: TextSpec, folder: SentenceFolder, encode: Encode) -> TextSpec:
    """How a transformer takes texts, with the folder's prompts and what the library does beside tokenizing.

    ``encode`` gives the ids of a text without a prompt.
    """
    own, lock = folder.tokenizing, Lock()

    def make(prompt: str, task: str | None, limit: int) -> Encode:
        part = folder.inputs[task]
        if part is not own:
            _check_tokenizer(part, own)
            of_part = partial(_encode_any, _make_encode(part, _get_limit(part)), EMPTY_MARK * vocabulary)
            return partial(_encode_prompted, of_part, prompt, limit, 0, task, vocabulary)
        if encodes_itself(folder, task):
            by_library = partial(_encode_by_library, own, lock, prompt, task, limit, vocabulary)
            by_library("a", limit, "none")  # it raises what it would raise for every text
            return by_library
        length = own._get_prompt_length(prompt) if prompt and vocabulary else 0
        return partial(_encode_prompted, encode, prompt, limit, length or 0, task, vocabulary)

    vocabulary = text.vocabulary if folder.has_marks else 0
    if vocabulary:
        text = replace(text, marks=count_marks())
    return _add_prompts(text, folder, make, min(_get_limit(own), text.max_tokens))


def describe_texts(folder: SentenceFolder, shown: str) -> tuple[SentenceModel, TextSpec]:
    """The model of a folder without a transformer, and how it takes texts."""
    first = folder.inputs[None]
    if any(each is not first for each in folder.inputs.values()):
        detail = f"the sentence-transformers folder {shown} has several ways, and none of them has a transformer"
        raise LoadError(detail, hint="give each way a folder of its own")
    vocabulary, limit = _count_ids(first), getattr(first, "max_seq_length", MAX_TOKENS + 1)
    has_limit = limit <= MAX_TOKENS
    encode = _make_encode(first, int(limit) if has_limit else None)
    text = TextSpec(
        ids=IDS,
        mask=MASK,
        max_tokens=int(limit) if has_limit else MAX_TOKENS,
        pad=int(getattr(first.tokenizer, "pad_token_id", None) or 0),
        vocabulary=vocabulary + 1,  # the last one is no token: of a text without any
        digest=_digest_tokenizer(first.tokenizer),
        truncate="end" if has_limit else "none",
        pads=not any(type(part).__name__ == "CNN" for part in folder.parts.values()),
    )

    def make(prompt: str, task: str | None, limit: int) -> Encode:
        return partial(_encode_prompted, partial(_encode_any, encode, vocabulary), prompt, limit, 0, task, 0)

    module = SentenceModel(folder.parts, folder.final, vocabulary, text.pad)
    return module, _add_prompts(text, folder, make, text.max_tokens)


def encodes_itself(folder: SentenceFolder, task: str | None = None) -> bool:
    """Whether the library does more with a text than to tokenize it: a chat template, a query's expansion."""
    own = folder.tokenizing
    expands = task == "query" and own.query_expansion is not None
    return "message" in own.modality_config or not own.tokenizer.is_fast or expands


def list_limits(folder: SentenceFolder) -> dict[str, int]:
    """The tokens of texts with some prompts; the others have the model's limit."""
    found = {}
    for name in folder.model.prompts:
        task = PROMPT_TASKS.get(name)
        part = folder.inputs[task]
        if part is not folder.inputs[None]:
            found[name] = _get_limit(part)
        limit = getattr(part, f"{task}_length", None) if task else None
        expansion = getattr(part, "query_expansion", None) if task == "query" else None
        if expansion is not None:
            length = int(expansion["length"])
            limit = length if expansion["strategy"] == "fixed" else max(limit, length) if limit else None
        if limit:
            found[name] = int(limit)
    return found


def _add_prompts(
    text: TextSpec, folder: SentenceFolder, make: Callable[[str, str | None, int], Encode], most: int
) -> TextSpec:
    """The folder's prompts, each with the tokenizer of texts with it; others than some have ``most`` tokens."""
    prompts = {name: prompt or "" for name, prompt in folder.model.prompts.items()}
    default = prompts.get(folder.model.default_prompt_name or "", "")
    limits = list_limits(folder)
    changes = {name: [f"{limit} tokens"] for name, limit in limits.items() if limit != most}
    for part in folder.parts.values():
        ways = dict(zip(TASKS, getattr(part, "ways", TASKS[:1] * len(TASKS)), strict=True))
        for name in prompts:
            if ways[PROMPT_TASKS.get(name)] != ways[None]:
                changes.setdefault(name, []).append(str(ways[PROMPT_TASKS.get(name)]))
    if folder.tokenizing is not None and folder.tokenizing.query_expansion is not None:
        changes.setdefault("query", []).append("expanded")
    return replace(
        text,
        encode=make(default, None, most),
        encoders={
            name: make(prompt, PROMPT_TASKS.get(name), limits.get(name, most)) for name, prompt in prompts.items()
        },
        prompts=prompts,
        slow_prompts=frozenset(
            name for name in prompts if folder.tokenizing and encodes_itself(folder, PROMPT_TASKS.get(name))
        ),
        default_prompt=default,
        effects={name: ", ".join(dict.fromkeys(each)) for name, each in changes.items()},
    )


def _encode_prompted(
    encode: Encode,
    prompt: str,
    most: int,
    length: int,
    task: str | None,
    vocabulary: int,
    text: str,
    limit: int,
    truncate: Truncate,
) -> Encoded:
    """A text behind its prompt, whose first ``length`` tokens are marked; without a ``vocabulary`` none are."""
    ids, cut = encode(prompt + text, min(most, limit), truncate)
    if vocabulary:
        marks = [PROMPT_MARK if index < length else NO_MARK for index in range(len(ids))]
        ids = mark_tokens(ids, marks, task, vocabulary)
    return ids, cut


def _encode_by_library(
    own: Any,
    lock: Lock,
    prompt: str,
    task: str | None,
    most: int,
    vocabulary: int,
    text: str,
    limit: int,
    truncate: Truncate,
) -> Encoded:
    """The ids that the library's module makes of a text."""

    def run(**options: Any) -> Any:
        return own.preprocess([text], prompt=prompt, task=task, processing_kwargs={"text": options})

    with lock:  # the library changes its tokenizer at each call
        limit = min(most, limit)
        own.tokenizer.truncation_side = "left" if truncate == "start" else "right"
        rows = run(truncation=False)
        excess = max(len(rows["input_ids"][0]) - limit, 0)
        if excess and truncate != "none":
            rows = run(max_length=limit)
    ids: list[int] = rows["input_ids"][0].tolist()
    if vocabulary:
        expanded = rows.get("query_expansion_positions")
        marks = [NO_MARK] * len(ids) if expanded is None else (expanded[0] * EXPANSION_MARK).tolist()
        ids = mark_tokens(ids, marks, task, vocabulary)
    return ids, excess if truncate != "none" else 0


def _make_encode(part: Any, most: int | None) -> Encode:
    """The tokenizer of a module that is no transformer; texts have ``most`` tokens, None: as many as a model takes."""
    tokenizer = part.tokenizer
    if hasattr(tokenizer, "backend_tokenizer"):
        own = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        return partial(_encode_bare, own, most)
    if hasattr(tokenizer, "encode_batch"):
        return partial(_encode_bare, tokenizer, most)
    return partial(_encode_words, tokenizer, Lock(), most)


def _encode_bare(own: Any, most: int | None, text: str, limit: int, truncate: Truncate) -> Encoded:
    return _cut(own.encode(text, add_special_tokens=False).ids, most or limit, truncate)


def _encode_words(tokenizer: Any, lock: Lock, most: int | None, text: str, limit: int, truncate: Truncate) -> Encoded:
    with lock:
        return _cut(tokenizer.tokenize(text), most or limit, truncate)


def _encode_any(encode: Encode, none: int, text: str, limit: int, truncate: Truncate) -> Encoded:
    """The ids of a text, or the one of a text without any token."""
    ids, cut = encode(text, limit, truncate)
    return ids or [none], cut


def _cut(ids: list[int], limit: int, truncate: Truncate) -> Encoded:
    excess = max(len(ids) - limit, 0)
    if not excess or truncate == "none":
        return ids, 0
    return ids[excess:] if truncate == "start" else ids[:limit], excess


def _get_limit(part: Any) -> int:
    """The tokens that a module takes of a text; it may say infinity."""
    return int(min(part.max_seq_length, MAX_TOKENS))


def _count_ids(part: Any) -> int:
    """How many ids a module's texts may have."""
    kind = type(part).__name__
    counts: dict[str, Callable[[], Any]] = {
        "StaticEmbedding": lambda: part.embedding.padding_idx,
        "WordEmbeddings": lambda: part.emb_layer.num_embeddings,
        "BoW": lambda: len(part.vocab),
        "SparseStaticEmbedding": lambda: part.num_dimensions,
    }
    if kind not in counts:
        raise LoadError(f"texts can't begin in a {kind} here", hint="give a folder whose first module tokenizes")
    return int(counts[kind]())


def _check_tokenizer(part: Any, own: Any) -> None:
    """LoadError unless a way's tokenizer has the ids of the transformer's."""
    tokenizer = getattr(part.tokenizer, "tokenizer", part.tokenizer)
    if not hasattr(tokenizer, "get_vocab") or tokenizer.get_vocab() != own.tokenizer.get_vocab():
        detail = "the ways of a Router have tokenizers of different vocabularies, which is not built here"
        raise LoadError(detail, hint="give each way a folder of its own")


def _digest_tokenizer(tokenizer: Any) -> str:
    own = getattr(tokenizer, "tokenizer", tokenizer)  # of a wrapper
    own = getattr(own, "backend_tokenizer", own)
    settings = own.to_str() if hasattr(own, "to_str") else repr((list(own.get_vocab()), sorted(own.stop_words)))
    return hashlib.sha256(f"{settings} {getattr(own, 'do_lower_case', '')}".encode()).hexdigest()
