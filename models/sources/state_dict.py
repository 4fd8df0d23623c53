"""Load state dicts into modules, and compare the loaded weights with the given ones, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from layertap.models.devices.plain_tensors import view_bytes
from layertap.models.errors import LoadError, escape, find_nearest, format_names, label_failures
from layertap.models.sources.adapters import insert_adapter, list_adapter_names, make_unmerged_error
from layertap.models.sources.checkpoints import StateDict, fit_names

MAX_NAMES = 100  # in a report
MAX_COMPARED_NAMES = 20  # missing names that are compared: it takes time
FIT_HINT = "for another variant give its constructor's arguments by args:, or type python:package.module:factory"
STRICT_HINT = "type strict: false to take what fits; missing ones are then as random:0 draws them"
TIE_HINT = "give weights that were saved from this architecture, or a factory whose model does not share the tensor"


@dataclass(frozen=True)
class LoadReport:
    """Which tensors of a checkpoint were loaded into a module.

    ``key``: the dictionary in the file; ``prefix``: the prefix removed from names; ``missing``: the module's names that
    the file lacks; ``left_over``: the file's names that the module lacks; ``unread``: the file's other entries;
    ``adapter``: the folder of the merged adapter.
    """

    key: str = ""
    prefix: str = ""
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    adapter: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings in every reply: of missing tensors, whose values are random, and of those that are not used."""
        lists = {
            "the checkpoint lacks weights of this model, which are random": self.missing,
            "the checkpoint has weights that this model has not": self.left_over,
        }
        return tuple(
            f"{text}: {format_names([escape(name) for name in names])}" for text, names in lists.items() if names
        )

    def describe(self) -> dict[str, Any]:
        """The report for JSON, without empty fields; lists of names become their count and the first names."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: {"count": len(value), "names": list(value[:MAX_NAMES])} if isinstance(value, tuple) else value
            for name, value in facts.items()
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
    state = fit_names(tensors if isinstance(tensors, StateDict) else StateDict(tensors), module.state_dict().keys())
    if adapted := list_adapter_names(state.keys() - module.state_dict().keys()):
        if not adapter:
            raise make_unmerged_error(adapted, label)
        with insert_adapter(module, Path(adapter)):
            report = load_state_dict(module, tensors, label, min_bits, classes=classes, strict=strict)
        return replace(report, adapter=Path(adapter).name)
    state = _add_shared_tensors(module, state)
    try:
        missing, left_over = _load(module, state, strict or state.keys().isdisjoint(module.state_dict()))
    except (RuntimeError, ValueError) as error:
        detail = f"weights {escape(label)} do not fit the architecture: {_describe_differences(module, state)}"
        raise LoadError(detail, hint=_make_fit_hint(module, state, classes)) from error
    refuse_scales(tensors, left_over, escape(label))
    raise_for_different(_list_different(module, state, label, min_bits), escape(label))
    return LoadReport(state.key, state.prefix, tuple(missing), tuple(left_over), state.unread)


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


def has_same_values(held: Tensor, given: Tensor) -> bool:
    """Whether a tensor has exactly the given values, cast to its own dtype."""
    cast = given.to(held.device, held.dtype)
    return held.shape == cast.shape and torch.equal(view_bytes(held), view_bytes(cast))


def _add_shared_tensors(module: nn.Module, state: StateDict) -> StateDict:
    """Add the names that a state dict leaves out because their tensors are shared with others.

    Sharing is read from the file (as safetensors' ``save_model`` writes it) or found in the module.
    """
    tensors = module.state_dict(keep_vars=True)
    names = {_get_identity(value): name for name, value in tensors.items() if name in state}
    whole = copy(state)
    for name in tensors.keys() - state.keys():
        written = state.shared_names.get(name)
        source = written if written in state else names.get(_get_identity(tensors[name]))
        if source is not None:
            whole[name] = state[source]
    return whole


def _get_identity(value: object) -> object:
    """A key that is equal for two names of one tensor."""
    if isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def _load(module: nn.Module, state: StateDict, strict: bool) -> tuple[list[str], list[str]]:
    """Load a state dict; return missing and left-over names, which are empty with ``strict``."""
    try:
        return module.load_state_dict(state, strict)  # type: ignore[no-any-return]
    except ValueError:
        # torchvision's MNASNet refuses a state dict without its class's version, which safetensors can't store.
        versioned: Any = OrderedDict(state)
        versioned._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
        return module.load_state_dict(versioned, strict)  # type: ignore[no-any-return]


def _list_different(module: nn.Module, state: StateDict, label: str, min_bits: int) -> list[str]:
    """Names of tensors whose values in the module differ from the given ones, or have too few bits.

    LoadError if the module shares one tensor between two names whose given values differ.
    """
    converted = tuple(_list_converting_prefixes(module))
    held = {
        name: value
        for name, value in module.state_dict().items()
        if name in state and isinstance(value, Tensor) and not name.startswith(converted)
    }
    different = {name for name, value in held.items() if not has_same_values(value, state[name])}
    for name in sorted(different):
        identity = _get_identity(held[name])
        for other in held:
            if _get_identity(held[other]) == identity and not has_same_values(state[name], state[other]):
                detail = f"the model has one tensor for {escape(name)} and {escape(other)}, {escape(label)} has two"
                raise LoadError(detail, hint=TIE_HINT)
    floating = {name: value for name, value in held.items() if value.is_floating_point()}
    return sorted(different.union(name for name, each in floating.items() if torch.finfo(each.dtype).bits < min_bits))


def _list_converting_prefixes(module: nn.Module) -> Iterator[str]:
    """The name prefixes of submodules that convert tensors on loading."""
    for name, part in module.named_modules(remove_duplicate=False):
        methods = (type(part)._load_from_state_dict, type(part).load_state_dict)
        overridden = not all(method.__module__.startswith("torch.") for method in methods)
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks or overridden:
            yield f"{name}." if name else ""


def _make_fit_hint(module: nn.Module, state: StateDict, classes: str) -> str:
    tensors = module.state_dict()
    shapes = [(each.shape, state[name].shape) for name, each in tensors.items() if name in state]
    if count := _find_class_count(shapes) if tensors.keys() == state.keys() else None:
        return f"type args: {{{classes}: {count}}}"
    if pairs := _pair_alike(tensors, state):
        # Do not suggest strict: false: it would draw at random what the file has under another name.
        renamed = format_names([f"{escape(other)} to {escape(name)}" for name, other in pairs.items()])
        return f"rename {renamed} in the file, for they look alike; {FIT_HINT}"
    fits = bool(shapes) and all(held == given for held, given in shapes)
    return f"{FIT_HINT}; {STRICT_HINT}" if fits else FIT_HINT


def _pair_alike(tensors: Mapping[str, Tensor], state: StateDict) -> dict[str, str]:
    """The first few missing names, each with the similar left-over name of the same shape."""
    pairs: dict[str, str] = {}
    for name in [name for name in tensors if name not in state][:MAX_COMPARED_NAMES]:
        rest = state.keys() - tensors.keys() - set(pairs.values())
        if found := find_nearest(name, sorted(each for each in rest if state[each].shape == tensors[name].shape)):
            pairs[name] = found[0]
    return pairs


def _find_class_count(shapes: list[tuple[torch.Size, torch.Size]]) -> int | None:
    """How many classes a state dict's heads have, if only that number differs from the module's."""
    pairs = [(held, given) for held, given in shapes if held != given]
    counts = {(held[0], given[0]) for held, given in pairs if held and given and held[1:] == given[1:]}
    alike = all(held and given and held[1:] == given[1:] for held, given in pairs)
    return counts.pop()[1] if alike and len(counts) == 1 else None


def _describe_differences(module: nn.Module, state: StateDict) -> str:
    tensors = module.state_dict()
    kinds = {
        "missing": [escape(name) for name in tensors if name not in state],
        "unexpected": [escape(name) for name in state if name not in tensors],
        "of another shape": [
            f"{escape(name)} is {tuple(state[name].shape)}, not {tuple(tensors[name].shape)}"
            for name in tensors
            if name in state and state[name].shape != tensors[name].shape
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
