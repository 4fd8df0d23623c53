"""Forwards of transformers' causal language models that generate: the loop over the model with its own cache."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layertap.models.hooks.attention import disable_observers
from layertap.models.inputs.generation import GENERATE, read_row
from layertap.models.sources.checkpoints import LOCAL
from layertap.models.sources.transformers_inputs import IDS, MASK
from layertap.models.spec import Generation

CACHE, LAST_ONLY = "past_key_values", "logits_to_keep"
NO_TOKEN = -1  # behind the end of a generation


def let_generate(library: Any, module: Any, folder: Path) -> tuple[int, ...] | None:
    """Let a model's forward take GENERATE too; returns the ids that end its texts, None if it can't generate."""
    whole = type(module)
    signature = inspect.signature(whole.forward)
    if not module.can_generate() or module.config.is_encoder_decoder or CACHE not in signature.parameters:
        return None

    def forward(self: Any, *single: Any, **rows: Any) -> Any:
        if GENERATE not in rows:
            return whole.forward(self, *single, **rows)
        return _generate(lambda **given: whole.forward(self, **given), rows, LAST_ONLY in signature.parameters)

    further = inspect.Parameter(GENERATE, inspect.Parameter.KEYWORD_ONLY, default=None)
    *named, last = signature.parameters.values()
    named += [further, last] if last.kind is inspect.Parameter.VAR_KEYWORD else [last, further]
    forward.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    module.__class__ = type(whole.__name__, (whole,), {"forward": forward, "__module__": whole.__module__})
    has_own = (folder / "generation_config.json").is_file()
    config = library.GenerationConfig.from_pretrained(str(folder), **LOCAL) if has_own else module.generation_config
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


def _generate(run: Callable[..., Any], rows: Mapping[str, Tensor], last_only: bool) -> dict[str, Tensor]:
    """The tokens after texts (N, steps), NO_TOKEN behind the end, and the logits of each (N, steps, vocabulary).

    ``run`` calls the model, of which hooks see its layers, once for a token of each. Several texts are to have
    no ``stop``: they would end at different steps.
    """
    ids, mask = rows[IDS], rows.get(MASK)
    with _hide_from_observers():  # neither this nor to choose is a part of the model, and each row does it for itself
        generations = [read_row(row) for row in rows[GENERATE]]
    choices, steps = [_make_choice(each) for each in generations], generations[0].steps
    cache, tokens, logits = None, list[Tensor](), list[Tensor]()
    kept = {LAST_ONLY: 1} if last_only else {}  # as the library generates: no other logits of a text are computed
    for _ in range(steps):
        masks = {MASK: mask} if mask is not None else {}
        output = run(**{IDS: ids, CACHE: cache, "use_cache": True, "return_dict": True, **masks, **kept})
        cache, scores = output[CACHE], output["logits"][:, -1].float()
        ids = torch.zeros_like(ids[:, -1:])
        with _hide_from_observers():
            chosen = [choose(scores[row : row + 1]) for row, choose in enumerate(choices)]
            ids.copy_(torch.tensor(chosen)[:, None])
        mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], 1)
        tokens.append(ids)
        logits.append(scores)
        if chosen[0] in (generations[0].stop or ()):  # one that may end runs alone
            break
    missing = steps - len(tokens)
    return {
        "tokens": torch.cat([*tokens, *[torch.full_like(ids, NO_TOKEN)] * missing], 1),
        "logits": torch.stack([*logits, *[torch.zeros_like(logits[0])] * missing], 1),
    }


@contextmanager
def _hide_from_observers() -> Iterator[None]:
    """Nothing that watches a forward sees the block's operations."""
    with disable_observers(), torch._C.DisableTorchFunction():
        yield


def _make_choice(generation: Generation) -> Callable[[Tensor], int]:
    """A function of the scores (1, vocabulary) that gives the next token."""
    if not generation.temperature:
        return lambda scores: int(scores.argmax())
    library = importlib.import_module("transformers")
    warpers = [library.TemperatureLogitsWarper(generation.temperature)]
    warpers += [library.TopKLogitsWarper(generation.top_k)] if generation.top_k else []
    warpers += [library.TopPLogitsWarper(generation.top_p)] if generation.top_p < 1 else []
    generator = torch.Generator().manual_seed(generation.seed)

    def choose(scores: Tensor) -> int:
        for warp in warpers:
            scores = warp(None, scores)
        # On the host, so that a seed draws the same numbers for every device.
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator))

    return choose
