"""Folders of the sentence-transformers library, an optional dependency, which loads them.

Only the transformer is loaded by us. No code of a folder is run: the kind of a module is looked up in a table of the
library's own classes. Nothing is unpickled.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from layertap.models.devices.turns import construct_alone
from layertap.models.errors import LoadError, escape
from layertap.models.grammar import import_library
from layertap.models.sources.checkpoints import LOCAL, read_checkpoint, wrap_errors
from layertap.models.sources.sentence_model import (
    LAYER,
    TASKS,
    TOKENS,
    FinalEmbedding,
    FinalTokens,
    HiddenStates,
    TokenVectors,
    TokenWeights,
    attach_parts,
    exclude_prompt,
    make_forward,
)
from layertap.models.sources.state_dict import find_base, load_state_dict

NEWER_FILE, ROUTER_FILES = "config_sentence_transformers.json", ("router_config.json", "config.json")
HINT = "move modules.json out of the folder to serve the transformer alone, and name its layer with embedding:"
MODELS = {  # the library's class by a folder's model_type
    **{name: name for name in ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder")},
    "ColBERT": "MultiVectorEncoder",
}
DECLINED = (
    *("model_args", "model_kwargs", "config_args", "config_kwargs"),
    *("tokenizer_name_or_path", "processing_kwargs"),
)
PROCESSOR = frozenset({"model_max_length", "padding_side", "truncation_side", "use_fast", "do_lower_case"})
ENCODERS = {"feature-extraction": "last_hidden_state", "fill-mask": "logits"}


@dataclass(frozen=True)
class SentenceFolder:
    """A folder as sentence-transformers saves it, and the library's model of it without its transformer.

    ``tokenizing`` is the library's module of the transformer, with its folder as ``path``, None if there is none;
    ``parts`` are the library's other modules by their names; ``inputs`` the modules that tokenize texts of each task.
    """

    model: Any
    tokenizing: Any
    parts: Mapping[str, Any]
    inputs: Mapping[str | None, Any]

    @property
    def is_masked(self) -> bool:
        """Whether the modules read the scores over the vocabulary that a transformer predicts for each token."""
        return self.tokenizing is not None and bool(self.tokenizing.transformer_task == "fill-mask")

    @property
    def final(self) -> nn.Module:
        """The last layer."""
        if type(self.model).__name__ == "MultiVectorEncoder":
            return FinalTokens()
        active = getattr(self.model, "max_active_dims", None)
        return FinalEmbedding(getattr(self.model, "truncate_dim", None), active)

    @property
    def has_marks(self) -> bool:
        """Whether the modules read more of a text than its tokens: its task, or which tokens are the prompt's."""
        excluding = any(getattr(part, "include_prompt", True) is False for part in self.parts.values())
        expanding = self.tokenizing is not None and self.tokenizing.query_expansion is not None
        return excluding or expanding or any(hasattr(part, "ways") for part in self.parts.values())

    def describe(self) -> str:
        """The settings that affect the embedding, without weights."""
        modules = [
            (f"{outer}.{name}", type(part).__name__, part.get_config_dict())
            for outer, top in self.parts.items()
            for name, part in top.named_modules()
            if hasattr(part, "get_config_dict")
        ]
        own = self.tokenizing.get_config_dict() if self.tokenizing else None
        final = self.final
        limits = [getattr(final, name, None) for name in ("dimensions", "active")]
        limits += [getattr(each, "max_seq_length", None) for each in self.inputs.values()]
        return repr((modules, own, self.model.prompts.get(self.model.default_prompt_name), limits))

    def attach(self, module: nn.Module, shown: str, *, all_layers: bool, vocabulary: int, two_towers: bool) -> None:
        """Let a transformer's forward run the folder's other modules; LoadError if they read of another method."""
        own, outputs = self.tokenizing, dict[str, tuple[tuple[str, ...], str]]()
        methods = {str(each["method"]) for each in own.modality_config.values()}
        if methods != ({"get_text_features", "get_image_features"} if two_towers else {"forward"}):
            raise _refuse(
                shown, f"reads {escape(', '.join(sorted(methods)))} of its transformer, which is not built here"
            )
        for modality, name in (("text", "input_ids"), ("message", "input_ids"), ("image", "pixel_values")):
            if modality in own.modality_config:  # the library makes messages of texts if it can
                path = own.modality_config[modality]["method_output_name"]
                outputs[name] = (path,) if isinstance(path, str) else tuple(path), own.module_output_name
        attach_parts(
            module,
            self.parts,
            self.final,
            outputs,
            _load_heads(own, vocabulary),
            all_layers=all_layers,
            vocabulary=vocabulary if self.has_marks and vocabulary else None,
            attends=(own.query_expansion or {}).get("attend", True),
        )


def read_sentence_folder(folder: Path, shown: str, base: Path | None = None) -> SentenceFolder | None:
    """Read a folder's modules.json and load its modules, but not the transformer; None if there is none.

    ``base``: where the transformer's configuration is, if not in the folder or where an adapter in it says.
    LoadError if it names a module that the library does not have; AbsentError without the library.
    """
    if not (folder / "modules.json").is_file():
        return None
    with _name_file(NEWER_FILE, shown):
        whole = _read_json(folder / NEWER_FILE)
        saved = str(whole.get("model_type", "SentenceTransformer"))
        dict(whole.get("prompts") or {})
    with _name_file("modules.json", shown):
        modules = [(str(each["type"]), _check_path(str(each["path"]))) for each in _read_json(folder / "modules.json")]
    if saved == "CrossEncoder" and [kind.rpartition(".")[2] for kind, _ in modules] == ["Transformer"]:
        return None  # the transformer itself returns the scores
    if saved not in MODELS:
        raise _refuse(shown, f"is a {escape(saved)}, which is not built here")
    library = import_library("sentence_transformers")
    several = importlib.import_module("sentence_transformers.multi_vector_encoder.model")
    is_several = MODELS[saved] == "MultiVectorEncoder"
    aliases = several._CLASS_REF_ALIASES if is_several else {}  # PyLate's names of the same modules
    table, classes = _list_kinds(), {}
    for number, (kind, _) in enumerate(_list_types(folder, modules, shown)):
        kind = aliases.get(kind, kind)
        found = table.get(kind.rpartition(".")[2]) if kind.startswith("sentence_transformers.") else None
        if found is None:
            raise _refuse(shown, f"names {escape(kind)} as number {number}, which is not built here")
        classes[kind] = _adapt(found, shown, base)
    if not classes:
        raise _refuse(shown, "has no modules")
    with _name_file("modules.json", shown), construct_alone(0):
        model = getattr(library, MODELS[saved])._load_with_module_classes(
            str(folder), classes, device="cpu", local_files_only=True
        )
    return _make_folder(model.eval(), shown)


def _make_folder(model: Any, shown: str) -> SentenceFolder:
    names = {}
    for number, part in enumerate(model):
        if number or not _is_transformer(part):
            if not hasattr(part, "name"):  # the library added it to an older folder
                part.__class__ = _adapt(type(part), shown, None)
            names[getattr(part, "name", None) or f"{number}_{type(part).__name__}"] = part
    inputs = dict.fromkeys(TASKS, model[0])
    for part in names.values():
        if _is_router(part):
            part.ways = _find_ways(part, shown)
            firsts = {task: part.sub_modules[part._resolve_route(task, "text")][0] for task in TASKS}
            inputs = firsts if part is model[0] else inputs
            for sequence in part.sub_modules.values():
                later = [*sequence][part is model[0] :]
                if any(_is_transformer(each) or _is_router(each) for each in later):
                    raise _refuse(shown, "has a Router inside of which others begin, which is not built here")
                if _is_transformer(sequence[0]):
                    sequence[0] = HiddenStates()
        elif "task" in getattr(part, "forward_kwargs", ()):
            part.ways = ("document", "query", "document")  # a text without a task counts as a document
    own_name = getattr(model[0], "module_output_name", LAYER)
    if (
        own_name == TOKENS
        and type(model).__name__ != "MultiVectorEncoder"
        and not any(map(_makes_vectors, names.values()))
    ):
        raise _refuse(shown, "has no Pooling")
    transformers = {each.path: each for each in inputs.values() if _is_transformer(each)}
    if len(transformers) > 1:
        raise _refuse(shown, "has several transformers, which is not built here")
    return SentenceFolder(model, next(iter(transformers.values()), None), names, inputs)


def _find_ways(router: Any, shown: str) -> tuple[str | None, ...]:
    """For each task the first one whose texts go the same way."""
    found: dict[str, str | None] = {}
    ways = []
    for task in TASKS:
        with _name_file(ROUTER_FILES[0], shown):
            ways.append(found.setdefault(router._resolve_route(task, "text"), task))
    return tuple(ways)


def _list_types(folder: Path, modules: list[tuple[str, str]], shown: str) -> Iterator[tuple[str, str]]:
    """The types of all modules and their folders, those inside routers too."""
    for kind, path in modules:
        yield kind, path
        if kind.rpartition(".")[2] in ("Router", "Asym"):
            with _name_file(f"{path or folder.name}/{ROUTER_FILES[0]}", shown):
                file = next(each for name in ROUTER_FILES if (each := folder / path / name).is_file())
                inner = [
                    (str(kind), f"{path}/{_check_path(str(name))}") for name, kind in _read_json(file)["types"].items()
                ]
            yield from inner


def _list_kinds() -> dict[str, Any]:
    """The library's classes of modules by their names."""
    found = (
        importlib.import_module("sentence_transformers.sentence_transformer.modules"),
        importlib.import_module("sentence_transformers.sparse_encoder.modules"),
        importlib.import_module("sentence_transformers.multi_vector_encoder.modules"),
    )
    kinds = {name: getattr(module, name) for module in found for name in module.__all__}
    return {name: kind for name, kind in kinds.items() if name not in UNSUPPORTED}


def _adapt(kind: Any, shown: str, base: Path | None) -> Any:
    """A subclass of one of the library's classes that names files in errors, and returns only what it changes."""
    is_transformer = any(base.__name__ == "Transformer" for base in kind.__mro__)
    load = _load_tokenizing if is_transformer else _load_part

    def load_part(
        cls: Any, path: str, subfolder: str = "", init_defaults: Any = None, module_classes: Any = None, **_: Any
    ) -> Any:
        options = {"init_defaults": init_defaults, "module_classes": module_classes}
        part = load(cls, Path(path, subfolder), shown, {name: each for name, each in options.items() if each})
        part.name = Path(subfolder).name
        return part

    members: dict[str, Any] = {"load": cast("Any", classmethod)(load_part), "__module__": kind.__module__}
    if is_transformer:
        members |= {
            "_load_config": lambda _, *given: _load_config(base, *given),
            "_load_model": lambda self, path, task, config, *_, **__: _NoModel(config),
        }
    else:
        members |= {"forward": make_forward(kind), "_exclude_prompt_from_mask": staticmethod(exclude_prompt)}
    return type(kind.__name__, (kind,), members)


def _load_config(base: Path | None, path: str, *_: Any) -> tuple[Any, bool]:
    found = base or find_base(Path(path))[0]
    return importlib.import_module("transformers").AutoConfig.from_pretrained(str(found), **LOCAL), False


class _NoModel(nn.Module):
    """Takes the place of a transformer in the library's module, which only tokenizes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def _load_tokenizing(cls: Any, folder: Path, shown: str, options: dict[str, Any]) -> Any:
    """The library's module of a transformer without its model: its tokenizer and settings."""
    with _name_file("sentence_bert_config.json", shown):
        own = cls.load_config(str(folder), local_files_only=True)
    for key in DECLINED:
        if own.get(key):
            raise _refuse(shown, f"has {key}, which are not read here")
    for key in ("tokenizer_args", "processor_kwargs"):
        if unknown := [str(name) for name in own.get(key, ()) if name not in PROCESSOR]:
            raise _refuse(shown, f"has {escape(unknown[0])} in {key}, which is not read here")
    with wrap_errors(f"the tokenizer of {shown} could not be built"):
        kind = cls.__mro__[1]
        part = kind.load.__func__(cls, str(folder), **LOCAL, **options)
        text = part.modality_config.get("message", part.modality_config.get("text", {}))
    if part.transformer_task not in ENCODERS or not text:
        raise _refuse(shown, "takes something else of its transformer than a text's tokens")
    part.path = folder
    return part


def _load_part(cls: Any, folder: Path, shown: str, options: dict[str, Any]) -> Any:
    """One of the library's modules with its weights."""
    kind = cls.__mro__[1]
    with _name_file(f"{folder.name}/{kind.config_file_name}", shown):
        config = kind.load_config(str(folder), local_files_only=True)
        activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if kind.__name__ == "Dense" and activation not in ACTIVATIONS:  # the library would take another
            raise _refuse(shown, f"has a Dense with {escape(str(activation))}, which is not built here")
        if kind.__name__ == "SparseStaticEmbedding" and config.get("path"):
            raise _refuse(shown, "has its weights elsewhere, which are not read here")
        if kind.__name__ == "WordEmbeddings" and str(config["tokenizer_class"]).rpartition(".")[2] not in TOKENIZERS:
            raise _refuse(shown, f"has {escape(str(config['tokenizer_class']))}, which is not built here")
        part = kind.load(str(folder), **LOCAL, **options)
        part.__class__ = cls
        if kind.__name__ == "StaticEmbedding":  # a row that counts nowhere, for padding
            table = part.embedding.weight
            rows = torch.cat([table, table.new_zeros(1, table.shape[1])])
            part.embedding = nn.EmbeddingBag.from_pretrained(rows, mode="mean", padding_idx=len(table))
        for value in (*part.parameters(), *part.buffers()):
            value.data = value.data.clone()  # it may be memory-mapped
    return part


def _load_heads(own: Any, vocabulary: int) -> dict[str, nn.Module]:
    """BGE-M3's heads for sparse and many vectors, if the files that it adds to such folders are there."""
    heads: dict[str, nn.Module] = {}
    for name in ("sparse", "colbert"):
        if not (own.path / f"{name}_linear.pt").is_file():
            continue
        state = read_checkpoint(own.path / f"{name}_linear.pt")
        width_out, width = state["weight"].shape
        linear = nn.Linear(width, width_out)
        load_state_dict(linear, state, f"{name}_linear.pt")
        tokenizer = own.tokenizer
        ids = {getattr(tokenizer, f"{each}_token_id") for each in ("cls", "eos", "pad", "unk")} - {None}
        vectors = TokenVectors(linear) if name == "colbert" else TokenWeights(linear, vocabulary, sorted(ids))
        heads[f"{name}_embedding"] = vectors
    return heads


def _is_transformer(part: Any) -> bool:
    return hasattr(part, "modality_config")


def _makes_vectors(part: Any) -> bool:
    return _is_router(part) or "Pooling" in type(part).__name__.removeprefix("WeightedLayer")


def _is_router(part: Any) -> bool:
    return hasattr(part, "sub_modules")


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


UNSUPPORTED = ("Module", "InputModule", "BaseTokenPooling", "HierarchicalTokenPooling", "LambdaTokenPooling")
TOKENIZERS = ("WhitespaceTokenizer", "TransformersTokenizerWrapper")
ACTIVATIONS = frozenset(
    f"{each.__module__}.{each.__name__}"
    for each in (*(getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__), nn.Identity)
)
