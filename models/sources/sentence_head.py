"""The modules after the transformer in a sentence-transformers folder: pooling, dense layers, normalisation.

The formulas are those of sentence-transformers 6.2, ``sentence_transformer/modules/pooling.py``.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.errors import LoadError, escape
from layertap.models.sources.checkpoints import find_weights, read_checkpoint, wrap_errors
from layertap.models.sources.state_dict import load_state_dict

LAYER = "sentence_embedding"
NEWER_FILE = "config_sentence_transformers.json"
HINT = "move modules.json out of the folder to serve the transformer alone, and name its layer with embedding:"
MODELS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # in names of older files
DECLINED = frozenset(
    {
        "processing_kwargs",
        "query_expansion",
        *(f"{each}_{kind}" for each in ("processor", "tokenizer", "model", "config") for kind in ("args", "kwargs")),
    }
)
MIN_COUNT = 1e-9


@dataclass(frozen=True)
class SentenceFolder:
    """A folder as sentence-transformers saves it.

    ``transformer`` is the folder of the transformer and its tokenizer; ``parts`` are the configurations of the modules
    after it, each with its kind and folder. Texts are cut to ``max_tokens``. ``prompts`` are prefixes for texts, by
    name; ``default_prompt`` is used if a request names none. ``limits``: the tokens of texts with some prompts.
    """

    transformer: Path
    parts: tuple[tuple[str, Path, dict[str, Any]], ...]
    max_tokens: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """The settings that affect the embedding, without weights."""
        parts = [(kind, config) for kind, _, config in self.parts]
        limits = [dict(self.limits)] if self.limits else []
        return json.dumps([parts, self.max_tokens, self.lowercase, self.default_prompt, self.dimensions, *limits])


def read_sentence_folder(folder: Path, shown: str) -> SentenceFolder | None:
    """Read a folder's modules.json; None if there is none, LoadError if it names unsupported modules."""
    if not (folder / "modules.json").is_file():
        return None
    with _name_file(NEWER_FILE, shown):
        whole = _read_json(folder / NEWER_FILE)
        saved = str(whole.get("model_type", "SentenceTransformer"))
        prompts = {str(name): str(text or "") for name, text in (whole.get("prompts") or {}).items()}
    with _name_file("modules.json", shown):
        modules = _read_json(folder / "modules.json")
        kinds = [(str(each["type"]), folder / _check_path(str(each["path"]))) for each in modules]
    transformer = kinds[0][1] if kinds else folder
    own: dict[str, Any] = {}
    for name in MODELS:
        with _name_file(f"sentence_{name}_config.json", shown):
            own = own or dict(_read_json(transformer / f"sentence_{name}_config.json"))
    if "text" not in (own.get("modality_config") or TEXTS) and "message" in own["modality_config"]:
        raise _refuse(shown, "takes texts as messages in its tokenizer's chat template, which is not built here")
    if saved == "CrossEncoder" and len(kinds) == 1:  # the transformer itself returns the scores
        return None
    if saved != "SentenceTransformer":
        raise _refuse(shown, f"is a {escape(saved)}, which is not built here")
    parts = []
    for number, (kind, part_folder) in enumerate(kinds):
        library, _, name = kind.partition(".")
        name = name.rpartition(".")[2]
        if library != "sentence_transformers" or name not in (PARTS[number : number + 1] if number < 2 else PARTS[2:]):
            raise _refuse(shown, f"names {escape(kind)} as number {number}, which is not built here")
        with _name_file(f"{part_folder.name}/config.json", shown):
            parts.append((name, part_folder, {} if number == 0 else dict(_read_json(part_folder / "config.json"))))
    if len(kinds) < 2:
        raise _refuse(shown, "has no Pooling")
    _check_transformer(own, shown)
    limits = {name: own.get(key) for key, names in LIMITS.items() for name in names}
    default = prompts.get(str(whole.get("default_prompt_name")), "")
    if any(config.get("include_prompt") is False for _, _, config in parts):
        if default:
            raise _refuse(shown, "pools a text without its prompt, which is not built here")
        prompts = {}  # requests with a prompt are refused; without one all tokens are pooled
    return SentenceFolder(
        transformer=transformer,
        parts=tuple(parts[1:]),
        max_tokens=own.get("max_seq_length"),
        lowercase=bool(own.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default,
        dimensions=whole.get("truncate_dim"),
        limits={name: limit for name, limit in limits.items() if limit is not None},
    )


class SentenceHead(nn.Module):
    """Hidden states of tokens (N, T, C) and their mask (N, T) → one embedding (N, D) for each text."""

    def __init__(self, parts: Mapping[str, nn.Module], dimensions: int | None) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.dimensions = dimensions

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """The sentence embedding; without a mask every token counts."""
        if mask is None or mask.shape[-1] != tokens.shape[1]:
            mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        first, *others = self.children()
        value: Tensor = first(tokens, mask)
        for part in others:
            value = part(value)
        return value[:, : self.dimensions]


class Pooling(nn.Module):
    """Pool each text's tokens in one or more modes, concatenated: (N, T, C) and (N, T) → (N, modes · C)."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Sums are computed in float32 or wider; the result has the tokens' dtype."""
        return torch.cat([MODES[mode](tokens, mask).to(tokens.dtype) for mode in self.modes], -1)

    def extra_repr(self) -> str:
        """The modes, for repr."""
        return ", ".join(self.modes)


class Dense(nn.Module):
    """``activation(linear(x))``, plus ``x`` or a projection of it where there is a residual connection."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, *, residual: bool) -> None:
        super().__init__()
        self.linear, self.activation_function = linear, activation
        if residual and linear.in_features != linear.out_features:
            self.residual: nn.Module = nn.Linear(linear.in_features, linear.out_features, bias=False)
        elif residual:
            self.residual = nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        """(N, in) → (N, out)."""
        out: Tensor = self.activation_function(self.linear(value))
        return out + self.residual(value) if hasattr(self, "residual") else out


class Normalize(nn.Module):
    """(N, D) → (N, D) of length 1."""

    def forward(self, value: Tensor) -> Tensor:
        """L2 over the last axis."""
        return functional.normalize(value, dim=-1)


def attach_head(module: Any, folder: SentenceFolder, shown: str) -> None:
    """Make a transformer's forward run the head as its last layer, and return the head's output with its own."""
    parts = {}
    for number, (kind, part_folder, config) in enumerate(folder.parts, 1):
        with _name_file(f"{part_folder.name}/config.json", shown):
            parts[f"{number}_{kind}"] = _build_part(kind, part_folder, config, shown)
    base: Any = type(module)
    names = list(inspect.signature(module.forward).parameters)
    position = names.index("attention_mask") if "attention_mask" in names else len(names)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = base.forward(self, *args, **kwargs)
        mask = kwargs.get("attention_mask", args[position] if position < len(args) else None)
        return {**output, LAYER: self.sentence_embedding(output["last_hidden_state"], mask)}

    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    module.sentence_embedding = SentenceHead(parts, folder.dimensions).eval()


def _build_part(kind: str, part_folder: Path, config: dict[str, Any], shown: str) -> nn.Module:
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, LAYER):
            raise _refuse(shown, f"has a {kind} with {key} {escape(str(config[key]))}, which is not built here")
    if kind == "Pooling":
        return Pooling(_read_modes(config, shown))
    if kind == "Normalize":
        return Normalize()
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise _refuse(shown, f"has a Dense with {escape(str(activation))}, which is not built here")
    linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True)))
    dense = Dense(linear, ACTIVATIONS[activation](), residual=bool(config.get("use_residual")))
    load_state_dict(dense, read_checkpoint(find_weights(part_folder)), f"{part_folder.name} of {shown}")
    return dense


def _read_modes(config: Mapping[str, Any], shown: str) -> tuple[str, ...]:
    """The pooling modes in the order of their results: newer folders name them, older ones have a flag for each."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLDER_MODES.items() if config.get(key)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    if not modes or not all(mode in MODES for mode in modes):
        raise _refuse(shown, f"pools by {escape(str(modes))}, which is not built here")
    return modes


def _check_transformer(config: Mapping[str, Any], shown: str) -> None:
    """LoadError if the folder uses anything but the transformer's last hidden states."""
    for key in DECLINED:
        if config.get(key):
            raise _refuse(shown, f"has {key}, which are not read here")
    task = config.get("transformer_task", "feature-extraction")
    text = (config.get("modality_config") or TEXTS).get("text")
    if task != "feature-extraction" or text != TEXT:
        raise _refuse(shown, "takes something else of its transformer than last_hidden_state of texts")


def _check_path(path: str) -> str:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(path)
    return path


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _name_file(name: str, shown: str) -> AbstractContextManager[None]:
    """Turn any exception inside into a LoadError that names the file."""
    return wrap_errors(f"{escape(name)} of {shown} can't be used", HINT)


def _refuse(shown: str, what: str) -> LoadError:
    return LoadError(f"the sentence-transformers folder {shown} {what}", hint=HINT)


def _find_first(mask: Tensor) -> Tensor:
    """The position of each text's first token: (N,)."""
    return mask.int().argmax(1)


def _take(tokens: Tensor, positions: Tensor) -> Tensor:
    return tokens.gather(1, positions[:, None, None].expand(-1, 1, tokens.shape[-1])).squeeze(1)


def _sum(tokens: Tensor, weights: Tensor, power: float = 1.0) -> Tensor:
    """The weighted sum of a text's tokens, divided by a power of the sum of the weights."""
    tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
    weights = weights.to(tokens.dtype)[..., None]
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=MIN_COUNT).pow(power)


def _pool_by_position(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean of tokens weighted by their positions, from 1 at the text's first."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) - _find_first(mask)[:, None]
    return _sum(tokens, mask * positions)


def _list_activations() -> dict[str, Callable[[], nn.Module]]:
    classes: list[Any] = [getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__]
    return {f"{each.__module__}.{each.__name__}": each for each in (*classes, nn.Identity)}


PARTS = ("Transformer", "Pooling", "Dense", "Normalize")  # a folder has the first two once, in this order
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
TEXTS = {"text": TEXT}
LIMITS = {"query_length": ("query",), "document_length": ("document", "passage", "corpus")}  # by the prompts' names
MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda tokens, mask: _take(tokens, _find_first(mask)),
    "max": lambda tokens, mask: tokens.masked_fill(mask[..., None] == 0, -torch.inf).amax(1),
    "mean": _sum,
    "mean_sqrt_len_tokens": lambda tokens, mask: _sum(tokens, mask, 0.5),
    "weightedmean": _pool_by_position,
    "lasttoken": lambda tokens, mask: _take(tokens, mask.shape[1] - 1 - mask.flip(1).int().argmax(1)),
}
OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = _list_activations()
