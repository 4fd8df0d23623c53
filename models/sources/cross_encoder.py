"""Folders that sentence-transformers' CrossEncoder saved: its scores, its limit and its prompts.

Read as sentence-transformers 6.2 reads them, ``cross_encoder/model.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from layertap.models.errors import LoadError, escape
from layertap.models.inputs.model_inputs import Encode, TextSpec
from layertap.models.sources.checkpoints import wrap_errors
from layertap.models.spec import Truncate

SCORES = "scores"  # the layer that returns what ``predict`` does
FILE, OWN_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"
NEUTRAL = frozenset({"transformer_task", "modality_config", "module_output_name", "unpad_inputs", "max_seq_length"})
HINT = "move {} out of the folder to serve the transformer alone"


@dataclass(frozen=True)
class CrossEncoderFolder:
    """What a folder says about a cross-encoder's scores: ``activation`` of its logits, the limit and the prompts."""

    activation: nn.Module
    is_default: bool  # the activation is the one that such a model has if nothing is saved
    max_tokens: int | None
    prompts: Mapping[str, str]
    default_prompt: str

    def describe(self) -> str:
        """The settings that affect scores, without weights; empty for the usual ones."""
        if self.is_default and not self.default_prompt:
            return ""
        return json.dumps([type(self.activation).__name__, self.default_prompt])

    def complete(self, text: TextSpec) -> TextSpec:
        """How texts are taken, with the folder's limit and prompts; a single text is cut as pairs are."""
        limit = min(text.max_tokens, self.max_tokens or text.max_tokens)
        own = replace(text, max_tokens=limit, truncate=text.side, prompts=self.prompts)
        if text.encode is None:
            return own
        make = partial(partial, _encode_behind, text.encode)
        encoders = {name: make(prompt) for name, prompt in self.prompts.items()}
        return replace(own, encode=make(self.default_prompt), encoders=encoders, default_prompt=self.default_prompt)


def read_cross_encoder(folder: Path, config: Any, shown: str) -> CrossEncoderFolder | None:
    """Read a folder's settings; None if no CrossEncoder saved it, LoadError if one that is not built here counts."""
    with wrap_errors(f"{FILE} of {shown} can't be used", HINT.format(FILE)):
        saved, own = _read_json(folder / FILE), _read_json(folder / OWN_FILE)
        prompts = {str(name): str(text or "") for name, text in dict(saved.get("prompts") or {}).items()}
    is_saved, of_config = saved.get("model_type") == "CrossEncoder", getattr(config, "sentence_transformers", None)
    older = getattr(config, "sbert_ce_default_activation_function", None)
    if not is_saved and of_config is None and older is None:
        return None
    path = saved.get("activation_fn") or dict(of_config or {}).get("activation_fn") or older
    for key, value in own.items() if is_saved else ():
        if value and key not in NEUTRAL:
            raise LoadError(f"{OWN_FILE} of {shown} has {escape(key)}, which is not built here", hint=HINT.format(FILE))
    default: type[nn.Module] = nn.Sigmoid if config.num_labels == 1 else nn.Identity
    activation = default()
    if isinstance(path, str) and path.startswith("torch."):  # the library passes over others too
        with wrap_errors(f"{escape(path)}, the activation of {shown}, can't be used", f"change it in {FILE}"):
            activation = ACTIVATIONS[path]()
    return CrossEncoderFolder(
        activation=activation,
        is_default=type(activation) is default,
        max_tokens=own.get("max_seq_length") if is_saved else None,
        prompts=prompts,
        default_prompt=prompts.get(str(saved.get("default_prompt_name")), ""),
    )


def _encode_behind(encode: Encode, prompt: str, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    return encode(prompt + text, limit, truncate)


def attach_scores(module: Any, folder: CrossEncoderFolder) -> None:
    """Make a classifier's forward compute its scores in a last layer, ``scores``; what it returns stays the same."""
    base: Any = type(module)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        self.scores(output["logits"])
        return output

    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    module.add_module(SCORES, folder.activation)


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def _list_activations() -> dict[str, type[nn.Module]]:
    classes: list[Any] = [getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__]
    several = (*classes, nn.Identity)
    return {f"{module}.{each.__name__}": each for each in several for module in ("torch.nn", each.__module__)}


ACTIVATIONS = _list_activations()
