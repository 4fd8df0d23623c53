"""Load state dicts and PEFT's adapters into modules, and compare the weights with the given ones, bit for bit."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from layertap.models.devices.transfer import view_bytes
from layertap.models.devices.turns import construct_alone
from layertap.models.errors import AbsentError, LoadError, escape, find_nearest, format_names, label_failures
from layertap.models.grammar import ADAPTER_CONFIG, import_library
from layertap.models.sources.checkpoints import StateDict, fit_names, read_checkpoint, wrap_errors

MAX_NAMES = 100  # in a report
MAX_COMPARED_NAMES = 20  # missing names that are compared: it takes time
FIT_HINT = "for another variant give its constructor's arguments by args:, or type python:package.module:factory"
STRICT_HINT = "type strict: false to take what fits; missing ones are then as random:0 draws them"
TIE_HINT = "give weights that were saved from this architecture, or a factory whose model does not share the tensor"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # the PEFT types that can be merged into weights
ADAPTER_NAME = "default"  # PEFT's name for an unnamed adapter
ADAPTER_PREFIX = "base_model.model."
BASE_HINT = (
    "source, args and weights are those of the model that it was trained beside: its adapter_config.json names it"
)
UNMERGED_HINT = (
    "type adapter: FOLDER of the adapter_config.json that the training saved, or write one with its "
    "peft_type, r, lora_alpha and target_modules; or save what PEFT's merge_and_unload() returns"
)
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoadReport:
    """Which tensors of a checkpoint were loaded into a module."""

    key: str = ""  # the dictionary in the file
    prefix: str = ""  # removed from names
    missing: tuple[str, ...] = ()  # the module's names that the file lacks
    left_over: tuple[str, ...] = ()  # the file's names that the module lacks
    unread: tuple[str, ...] = ()  # the file's other entries
    adapter: str = ""  # the folder of the merged adapter

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings in every reply: of missing tensors, whose values are random, and of those that are not used."""
        lists = {
            "the checkpoint lacks weights of this model, which are random": self.missing,
            "the checkpoint has weights that this model has not": self.left_over,
        }
        return tuple(f"{text}: {format_names([*map(escape, names)])}" for text, names in lists.items() if names)

    def describe(self) -> dict[str, Any]:
        """The report for JSON, without empty fields; lists of names become their count and the first names."""
        return {
            name: {"count": len(value), "names": list(value[:MAX_NAMES])} if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if value
        }


@label_failures("weights")
def load_state_dict(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    label: str,
    min_bits: int = 0,
    *,
    classes: str = "num_classes",
    strict: bool = True,
    adapter: str = "",
) -> LoadReport:
    """Copy a state dict into a module, every name and shape matched; each tensor keeps the module's dtype.

    A prefix before the module's names is dropped. Tensors that share memory need only one name. Afterwards the module's
    values are compared with the given ones. Without ``strict`` names may differ, shapes may not.
    Adapter tensors are merged into the others as configured in the folder ``adapter``.
    LoadError lists a few of the names that differ, or whose floats have fewer than ``min_bits``; ``classes`` is the
    constructor's argument for the number of classes.
    """
    wanted, shown = module.state_dict(keep_vars=True), escape(label)
    state = fit_names(tensors if isinstance(tensors, StateDict) else StateDict(tensors), wanted.keys())
    others = sorted(state.keys() - wanted.keys())
    if adapted := [name for name in others if re.search(r"(^|\.)(base_layer(\.|$)|lora_)", name)]:
        if not adapter:
            names = format_names([*map(escape, adapted)])
            detail = f"{shown} has a LoRA adapter that is not merged ({names}), and not its lora_alpha"
            raise LoadError(detail, hint=UNMERGED_HINT)
        with insert_adapter(module, Path(adapter)):
            report = load_state_dict(module, tensors, label, min_bits, classes=classes, strict=strict)
        return replace(report, adapter=Path(adapter).name)
    state = _add_shared_tensors(wanted, state)
    strict = strict or state.keys().isdisjoint(wanted)
    try:
        try:
            missing, left_over = module.load_state_dict(state, strict)
        except ValueError:  # a class may ask for its version, which safetensors can't store
            versioned: Any = OrderedDict(state)
            versioned._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
            missing, left_over = module.load_state_dict(versioned, strict)
    except (RuntimeError, ValueError) as error:
        detail = f"weights {shown} do not fit the architecture: {_describe_differences(wanted, state)}"
        raise LoadError(detail, hint=_make_fit_hint(wanted, state, classes)) from error
    refuse_scales(tensors, left_over, shown)
    raise_for_different(_list_different(module, state, shown, min_bits), shown)
    return LoadReport(state.key, state.prefix, tuple(missing), tuple(left_over), state.unread)


@label_failures("weights")
def merge_adapter(module: nn.Module, folder: Path) -> None:
    """Merge a folder's adapter into a module's weights with PEFT; LoadError if it can't be merged or does not fit."""
    shown, tensors = escape(folder.name), _read_adapter(folder)
    with insert_adapter(module, folder) as peft:
        found = peft.set_peft_model_state_dict(module, tensors)
        missing = [name for name in found.missing_keys if ADAPTER_NAME in name.split(".")]
        names = [escape(name) for name in (*missing, *found.unexpected_keys)]
        if names:
            raise LoadError(f"adapter {shown} does not fit the model: {format_names(names)}", hint=BASE_HINT)


def _read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's adapter by their names in the module; LoadError if there are none."""
    file = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        hint = f"it takes one of {', '.join(ADAPTER_FILES)}"
        raise LoadError(f"adapter {escape(folder.name)} holds no {ADAPTER_FILES[0]}", hint=hint)
    return {name.removeprefix(ADAPTER_PREFIX): value for name, value in read_checkpoint(file).items()}


def read_head(folder: Path | None) -> dict[str, Tensor]:
    """The tensors of a model that an adapter replaces as a whole, as a head's; empty without an adapter."""
    saved = _read_config(folder).get("modules_to_save") or ()
    tensors = _read_adapter(folder) if folder is not None and saved else {}
    return {name: value for name, value in tensors.items() if any(part in saved for part in name.split("."))}


def read_task(folder: Path | None) -> str:
    """PEFT's name of what an adapter was trained for; empty if it does not say so."""
    return str(_read_config(folder).get("task_type") or "")


def find_base(folder: Path) -> tuple[Path, Path | None]:
    """The folder of a model's configuration and weights, and that of an adapter to merge into them, if any.

    A folder that holds an adapter alone names the model's folder; AbsentError if there is none.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return folder, folder if (folder / ADAPTER_CONFIG).is_file() else None
    base = Path(str(_read_config(folder).get("base_model_name_or_path") or "."))
    if not (base / "config.json").is_file():
        shown, name = escape(folder.name), escape(base.name)
        hint = f"type source: transformers:PATH of {name}, and adapter: PATH of {shown}"
        raise AbsentError(f"{shown} holds an adapter of {name}, which is no folder here", hint=hint)
    return base, folder


def _read_config(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    with wrap_errors(f"{ADAPTER_CONFIG} of adapter {escape(folder.name)} can't be read"):
        return dict(json.loads((folder / ADAPTER_CONFIG).read_text("utf-8")))


@contextmanager
def insert_adapter(module: nn.Module, folder: Path) -> Iterator[Any]:
    """Insert a folder's adapter into a module with PEFT, yield the peft library, and merge at the end; LoadError.

    Only adapter_config.json is read from the folder. Inside, the module has the tensor names it had in training.
    """
    shown = f"adapter {escape(folder.name)}"
    peft = import_library("peft")
    # Some adapters are initialised from random parts of the weights.
    with wrap_errors(f"{shown} could not be merged into the model", BASE_HINT), construct_alone(0):
        kind = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))["peft_type"]
        if kind not in ADAPTER_KINDS:
            hint = f"types that are merged here: {', '.join(ADAPTER_KINDS)}"
            raise LoadError(f"{shown} is of the type {escape(str(kind))}, which is not merged into weights", hint=hint)
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        tuner = peft.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](module, {ADAPTER_NAME: config}, ADAPTER_NAME)
        yield peft
        tuner.merge_and_unload()


def refuse_scales(tensors: Mapping[str, Tensor], left_over: Iterable[str], shown: str) -> None:
    """LoadError if one-byte weights come beside scales that the model has no place for: they would not be applied."""
    small = {name.rpartition(".")[0] for name, value in tensors.items() if value.dtype.itemsize == 1}
    scales = [name for name in left_over if "scale" in name.rpartition(".")[2] and name.rpartition(".")[0] in small]
    if scales:
        detail = (
            f"{shown} holds 8-bit weights, and scales that nothing applies: {format_names(list(map(escape, scales)))}"
        )
        raise LoadError(detail, hint="save the model dequantized, in bfloat16 or float32")


def raise_for_different(names: list[str], shown: str) -> None:
    """LoadError if any tensor differs from the file's; ``names`` are those that do."""
    if names:
        detail = f"the model does not hold the weights of {shown}: {format_names([escape(name) for name in names])}"
        raise LoadError(detail, hint="load it again")


def holds_values(held: Tensor, given: Tensor) -> bool:
    """Whether a tensor has exactly the given values, cast to its own dtype."""
    cast = given.to(held.device, held.dtype)
    return held.shape == cast.shape and torch.equal(view_bytes(held), view_bytes(cast))


def _add_shared_tensors(wanted: Tensors, state: StateDict) -> StateDict:
    """Add the names that a state dict leaves out because their tensors are shared with others.

    Sharing is read from the file (as safetensors' ``save_model`` writes it) or found in the module's tensors.
    """
    names = {_get_identity(value): name for name, value in wanted.items() if name in state}
    whole = copy(state)
    for name in wanted.keys() - state.keys():
        written = state.shared_names.get(name)
        source = written if written in state else names.get(_get_identity(wanted[name]))
        if source is not None:
            whole[name] = state[source]
    return whole


def _get_identity(value: object) -> object:
    """A key that is equal for two names of one tensor."""
    if isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def _list_different(module: nn.Module, state: StateDict, shown: str, min_bits: int) -> list[str]:
    """Names of tensors whose values in the module differ from the given ones, or have too few bits.

    Tensors of submodules that convert them on loading are skipped. LoadError if the module shares one tensor between
    two names whose given values differ.
    """
    modules = module.named_modules(remove_duplicate=False)
    converting = tuple(f"{name}." if name else "" for name, part in modules if _converts(part))
    held = {
        name: value
        for name, value in module.state_dict().items()
        if name in state and isinstance(value, Tensor) and not name.startswith(converting)
    }
    different = {name for name, value in held.items() if not holds_values(value, state[name])}
    for name in sorted(different):
        for other, value in held.items():
            if _get_identity(value) == _get_identity(held[name]) and not holds_values(state[name], state[other]):
                detail = f"the model has one tensor for {escape(name)} and {escape(other)}, {shown} has two"
                raise LoadError(detail, hint=TIE_HINT)
    floats = {name: value for name, value in held.items() if value.is_floating_point()}
    return sorted(different.union(name for name, each in floats.items() if torch.finfo(each.dtype).bits < min_bits))


def _converts(part: nn.Module) -> bool:
    """Whether a module may convert tensors on loading."""
    methods = (type(part)._load_from_state_dict, type(part).load_state_dict)
    overridden = not all(method.__module__.startswith("torch.") for method in methods)
    return bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks or overridden)


def _make_fit_hint(wanted: Tensors, state: StateDict, classes: str) -> str:
    pairs = [(each, state[name]) for name, each in wanted.items() if name in state]
    others = [(held, given) for held, given in pairs if held.shape != given.shape]
    if others and wanted.keys() == state.keys():  # only the number of classes may differ
        are_alike = all(held.ndim and given.ndim and held.shape[1:] == given.shape[1:] for held, given in others)
        counts = {given.shape[0] for _, given in others} if are_alike else ()
        if len(counts) == 1:
            return f"type args: {{{classes}: {next(iter(counts))}}}"
    alike: dict[str, str] = {}  # the first missing names, each with the similar left-over name of the same shape
    for name in [name for name in wanted if name not in state][:MAX_COMPARED_NAMES]:
        rest = state.keys() - wanted.keys() - set(alike.values())
        if found := find_nearest(name, sorted(each for each in rest if state[each].shape == wanted[name].shape)):
            alike[name] = found[0]
    if alike:  # not strict: false, which would draw at random what the file has under another name
        renamed = format_names([f"{escape(other)} to {escape(name)}" for name, other in alike.items()])
        return f"rename {renamed} in the file, for they look alike; {FIT_HINT}"
    return f"{FIT_HINT}; {STRICT_HINT}" if pairs and not others else FIT_HINT


def _describe_differences(wanted: Tensors, state: StateDict) -> str:
    kinds = {
        "missing": [escape(name) for name in wanted if name not in state],
        "unexpected": [escape(name) for name in state if name not in wanted],
        "of another shape": [
            f"{escape(name)} is {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}"
            for name in wanted
            if name in state and state[name].shape != wanted[name].shape
        ],
    }
    return "; ".join(f"{kind}: {format_names(names)}" for kind, names in kinds.items() if names)


def digest_weights(module: nn.Module, *, saved_only: bool = False) -> str:
    """SHA-256, in hex, of all parameters and buffers: name, dtype, shape and little-endian bytes of each, by name.

    Equal for equal weights on every machine and device. ``saved_only``: without non-persistent buffers. These affect
    what a user's own code computes; a library's follow from its architecture, and differ between its versions.
    """
    hasher = hashlib.sha256()
    made = {} if saved_only else dict(module.named_buffers(remove_duplicate=False))
    tensors = {**module.state_dict(), **made}
    for name, value in sorted(tensors.items()):
        # A module's extra state may be any object, and only dense tensors have the same bytes everywhere.
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
            header = [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            hasher.update(json.dumps(header).encode())
            hasher.update(view_bytes(value).cpu().numpy().data)
    return hasher.hexdigest()
