"""What the classes of libraries return or take as an embedding, in the order in which it is looked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from layertap.models.selection.embedding import EmbeddingChoice

PRE_LOGITS = "what forward_head(pre_logits=True) returns"
FIRST_HEAD = "what the first of its heads takes: forward_head(pre_logits=True) joins what several take"
RETURNED = "{} returns it as {}"
MEAN = "mean over a text's tokens: nothing that was saved with the model names an embedding"
NO_HEAD = "no head over classes: the output is what forward_head(pre_logits=True) returns"


@dataclass(frozen=True)
class KnownEmbedding:
    """Where a class has its embedding, the surest first; ``classifier``: its output are scores of classes."""

    choices: tuple[EmbeddingChoice, ...] = ()
    classifier: bool = False


def find_known_embedding(module: nn.Module) -> KnownEmbedding:
    """What the library that a module's class is from, or derived from, says of its embedding; nothing of others."""
    for base in type(module).__mro__:
        find = FINDERS.get(base.__module__.partition(".")[0])
        if find is not None:
            return find(module)
    return KnownEmbedding()


def _find_in_timm(module: Any) -> KnownEmbedding:
    head = module.get_classifier() if hasattr(module, "forward_head") else None
    if isinstance(head, nn.Identity):
        return KnownEmbedding((EmbeddingChoice(".", NO_HEAD),))
    first, reason = (head[0], FIRST_HEAD) if isinstance(head, (tuple, list, nn.ModuleList)) else (head, PRE_LOGITS)
    names = [name for name, part in module.named_modules() if part is first]
    choices = tuple(EmbeddingChoice(f"{name}:input", reason, guessed=reason is FIRST_HEAD) for name in names)
    return KnownEmbedding(choices, classifier=True)


def _find_in_transformers(module: Any) -> KnownEmbedding:
    name = type(module).__name__
    if "Classification" in name:
        return KnownEmbedding(classifier=True)
    text = module.main_input_name == "input_ids"
    keys = ["text_embeds", "image_embeds"]
    if not text or not hasattr(module, "pooler"):  # BERT's pooler was trained for another task
        keys.append("pooler_output")
    choices = [EmbeddingChoice(f".[{key}]", RETURNED.format(name, key)) for key in keys]
    if text:
        places = (".", module.base_model_prefix)
        choices += [
            EmbeddingChoice(f"{place}[last_hidden_state]", MEAN, "mean", guessed=True) for place in places if place
        ]
    return KnownEmbedding(tuple(choices))


FINDERS = {
    "torchvision": lambda module: KnownEmbedding(classifier=True),
    "timm": _find_in_timm,
    "transformers": _find_in_transformers,
}
