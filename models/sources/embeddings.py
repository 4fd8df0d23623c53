"""Where the model classes of libraries have their embedding."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.devices.devices import use_threads
from layertap.models.devices.memory import is_device_error
from layertap.models.spec import EmbeddingSpec

Choice = tuple[EmbeddingSpec, str, bool]  # an embedding, the reason for it, and whether it is only a guess
PRE_LOGITS = "what forward_head(pre_logits=True) returns"
FIRST_HEAD = "what the first of its heads takes: no layer takes what forward_head(pre_logits=True) returns"
MEAN = "mean over a text's tokens: nothing that was saved with the model names an embedding"
NO_HEAD = "no head over classes: the output is what forward_head(pre_logits=True) returns"


def find_known_embeddings(module: nn.Module, row: Tensor) -> tuple[list[Choice], bool]:
    """Where a module's class has its embedding, most reliable first, and whether its output is class scores.

    None are known unless it is or derives from a known library's class. ``row`` is a batch of one; forwards run on one
    thread.
    """
    libraries = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    if "timm" in libraries:
        return _find_in_timm(module, row)
    if "transformers" in libraries:
        return _find_in_transformers(module)
    return [], "torchvision" in libraries


def _find_in_timm(module: Any, row: Tensor) -> tuple[list[Choice], bool]:
    head = module.get_classifier() if hasattr(module, "forward_head") else None
    if isinstance(head, nn.Identity):
        return [(EmbeddingSpec("."), NO_HEAD, False)], False
    first = head[0] if isinstance(head, (tuple, list, nn.ModuleList)) else head
    classifier = [name for name, part in module.named_modules() if part is first]
    try:
        takers = _find_takers(module, row)
    except Exception as error:  # a user's subclass may have another forward
        if is_device_error(error):
            raise
        takers = []
    if not takers:
        return [(EmbeddingSpec(f"{name}:input"), FIRST_HEAD, True) for name in classifier], True
    names = [name for name in classifier if name in takers] or takers[:1]
    return [(EmbeddingSpec(f"{name}:input"), PRE_LOGITS, False) for name in names], True


def _find_takers(module: Any, row: Tensor) -> list[str]:
    """The layers that take what forward_head(pre_logits=True) returns, in the order in which they run."""
    takers: list[str] = []

    def note(name: str, _: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0], wanted):
            takers.append(name)

    with torch.no_grad(), use_threads(1), ExitStack() as stack:
        features = module.forward_features(row)
        wanted = module.forward_head(features, pre_logits=True)
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(partial(note, name)).remove)
        module.forward_head(features)
    return takers


def _find_in_transformers(module: Any) -> tuple[list[Choice], bool]:
    name = type(module).__name__
    if "Classification" in name:
        return [], True
    text = module.main_input_name == "input_ids"
    keys = ["text_embeds", "image_embeds"]
    if not text or not hasattr(module, "pooler"):  # BERT's pooler was trained for another task
        keys.append("pooler_output")
    choices = [(EmbeddingSpec(f".[{key}]"), f"{name} returns it as {key}", False) for key in keys]
    if text:
        layers = filter(None, (".", module.base_model_prefix))
        choices += [(EmbeddingSpec(f"{layer}[last_hidden_state]", "mean"), MEAN, True) for layer in layers]
    return choices, False
