"""Attention weights: the operations that compute them, and how weights are observed, replaced and differentiated.

Weights are a softmax over keys for each query; a model drops those of its learned sinks. A fused kernel shows no
weights: they are computed beside it, and must explain the kernel's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import _cast
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from layertap.models.devices.dispatch_mode import DispatchMode
from layertap.models.errors import InputError
from layertap.models.hooks.running_calls import run_own
from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
# How far a kernel's output may lie from what the weights give, as a part of the largest value.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Operands = Mapping[str, Any]


@dataclass
class Sinks:
    """How many learned sinks follow the real keys: they take weight, have no value, and the model drops them."""

    count: int = 0


@dataclass(frozen=True)
class AttentionEvent:
    """One attention as an operation computed it."""

    shape: tuple[int, ...]  # of the weights: (…, queries, keys)
    dtype: torch.dtype
    evidence: Tensor  # has the rows on the same axis as the weights
    source: str  # "observed", or "recomputed" beside a fused kernel
    # A copy. To be called at once, before the forward overwrites its operands; InputError if the weights do not explain
    # the kernel's output.
    weights: Callable[[], Tensor]
    sinks: Sinks = field(default_factory=Sinks)  # counted by the next operation, which drops their weights


class AttentionObserver(DispatchMode):
    """Shows every attention that is computed inside, and changes nothing."""

    def __init__(self, observe: Callable[[AttentionEvent], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe
        self._latest: AttentionEvent | None = None  # of the operation before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Operands | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        latest, self._latest = self._latest, None
        if latest is not None and latest.source == "observed" and args and args[0] is latest.evidence:
            latest.sinks.count = count_sinks(latest.evidence, out)
        read = READERS.get(func._schema.name)
        if read is not None:
            names = (argument.name for argument in func._schema.arguments)
            self._latest = read(func, dict(zip(names, args, strict=False)) | dict(kwargs or {}), out)
            if self._latest is not None:
                run_own(self._observe, self._latest)
        return out


def disable_observers() -> AbstractContextManager[object]:
    """Disable dispatch observers inside the block: layertap's own operations need not be observed."""
    return torch._C._DisableTorchDispatch()


class UnfusedAttention(TorchFunctionMode):
    """Runs attention by its plain formula.

    ``anchor`` receives the weights (without sinks, in the module's shape) and returns the weights to use.
    ``is_paused`` disables it. ``is_running`` is true while it computes weights: an observer that sees weights at
    another time sees some that this mode can't change.
    """

    def __init__(self, anchor: Callable[[Tensor], Tensor], is_paused: Callable[[], bool]) -> None:
        super().__init__()
        self._anchor = anchor
        self._is_paused = is_paused
        self.is_running = False
        self._waiting: Tensor | None = None
        self._anchored: list[tuple[Tensor, Tensor]] = []  # softmax's results and their replacements

    def settle(self, value: Any) -> Any:
        """A value with anchored weights in it."""
        if self._waiting is not None and _holds(value, self._waiting):
            waiting, self._waiting = self._waiting, None
            self._anchored.append((waiting, self._anchor(waiting)))
        for original, replacement in self._anchored:
            for path, tensor in iterate_tensors(value):
                if tensor is original:
                    value = replace_tensor(value, path, replacement)
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Operands | None = None
    ) -> Any:
        options = kwargs or {}
        if self._waiting is not None and func is Tensor.__getitem__ and args[0] is self._waiting:
            out = func(*args)
            if count_sinks(self._waiting, out):
                self._waiting = None
                return self._anchor(out)
        if self._waiting is not None or self._anchored:
            args, options = self.settle((args, options))
        if self._is_paused() or func not in ATTENDING:
            return func(*args, **options)
        if func is functional.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **options)
        self.is_running = True
        try:
            if func is functional.scaled_dot_product_attention:
                return self._attend(*args, **options)
            out = func(*args, **options)
            is_weights = _is_over_keys(out, options.get("dim", args[1] if len(args) > 1 else None))
            if is_weights:
                self.settle(self._waiting)
                self._waiting = out
            return out
        finally:
            self.is_running = False

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as it hands them to a kernel, which rounds nothing in between
            given = query, key, value, attn_mask
            query, key, value, attn_mask = _cast(given, device, torch.get_autocast_dtype(device))
        with torch._C._DisableAutocast():
            weights = self._anchor(_compute_weights(query, key, attn_mask, is_causal, scale))
            return torch.dropout(weights, dropout_p, train=dropout_p > 0) @ _repeat_for_heads(value, query)


def count_sinks(weights: Tensor, kept: object) -> int:
    """How many of the last keys a slice of weights leaves out; 0 if it is no such slice."""
    if not isinstance(kept, Tensor) or kept.shape[:-1] != weights.shape[:-1]:
        return 0
    is_first = kept.data_ptr() == weights.data_ptr() and kept.stride() == weights.stride()
    return weights.shape[-1] - kept.shape[-1] if is_first else 0


def list_heads(module: nn.Module) -> list[int]:
    """How many heads a module says that it has; empty if it says nothing."""
    return [size for name in HEADS if isinstance(size := getattr(module, name, None), int) and size > 0]


def _get_config_heads(module: nn.Module) -> int | None:
    return getattr(getattr(module, "config", None), "num_attention_heads", None)


def list_heads_around(modules: Mapping[str, nn.Module], module: nn.Module) -> list[int]:
    """How many heads, above one, the module says that it has for which a part without weights computes.

    Empty if the part has several names, under which it computes for modules that say different things.
    """
    if next(module.parameters(), None) is not None:
        return []
    around = {tuple(_list_heads_above(modules, name)) for name, part in modules.items() if part is module}
    # With a single head every softmax of three axes would fit.
    return [size for size in around.pop() if size > 1] if len(around) == 1 else []


def _list_heads_above(modules: Mapping[str, nn.Module], name: str) -> list[int]:
    while name != ".":
        name = name.rpartition(".")[0] or "."
        if heads := list_heads(modules[name]):
            return heads
        if next(modules[name].parameters(), None) is not None:
            break
    return []


def find_owner(running: Sequence[nn.Module]) -> nn.Module:
    """Of the modules that are running, outermost first, the one whose attention it is: the innermost composite one."""
    return next((module for module in reversed(running) if _is_composite(module)), running[-1])


def find_nested_attention(module: nn.Module) -> list[nn.Module]:
    """The parts of a module whose attention is not the module's own."""
    return [part for part in module.modules() if part is not module and _is_composite(part)]


def _is_composite(module: nn.Module) -> bool:
    """Whether a module has parameters or parts; a softmax or a dropout has neither."""
    return any(True for _ in module.parameters()) or any(True for _ in module.children())


def unfold_weights(shape: tuple[int, ...], module: nn.Module, heads_around: Sequence[int]) -> tuple[int, ...] | None:
    """Weights of a module as (N, heads, queries, keys), windows among the rows; None if they are no attention.

    Where a module says how many heads it has, they stand before the queries, and nowhere else. Of three axes the first
    holds rows and heads, as many as the module or the one around it says; else that is not taken for attention.
    """
    heads = list_heads(module)
    groups = getattr(module, "num_key_value_groups", 1)
    if len(shape) == 4 and groups == shape[2] > 1 and shape[1] * groups == _get_config_heads(module):
        return (shape[0], shape[1] * groups, 1, shape[3])  # transformers packs a single query's heads by their keys
    if len(shape) >= 4:
        if heads and (shape[-3] not in heads or any(size in heads for size in shape[1:-3])):
            return None
        return (math.prod(shape[:-3]), *shape[-3:])
    count = next((size for size in heads or heads_around if len(shape) == 3 and shape[0] % size == 0), None)
    return None if count is None else (shape[0] // count, count, *shape[1:])


def _read_softmax(func: Any, arguments: Operands, out: Tensor) -> AttentionEvent | None:
    if out.is_nested or not _is_over_keys(out, arguments["dim"]):
        return None
    return AttentionEvent(tuple(out.shape), out.dtype, out, "observed", out.clone)


def _read_fused(func: Any, arguments: Operands, out: Any) -> AttentionEvent | None:
    output: Tensor = out[0] if isinstance(out, tuple) else out
    query, key = arguments["query"], arguments["key"]
    if output.is_nested:
        return None
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    is_causal, scale = arguments.get("is_causal", False), arguments.get("scale")
    compute_weights = partial(_compute_weights, query, key, mask, is_causal, scale)
    shape = (*output.shape[:-1], key.shape[-2])
    if len(shape) <= 2:
        return None
    weights = partial(_recompute, compute_weights, query, arguments["value"], output)
    return AttentionEvent(shape, query.dtype, output, "recomputed", weights)


def _recompute(compute_weights: Callable[[], Tensor], query: Tensor, value: Tensor, output: Tensor) -> Tensor:
    weights = compute_weights()
    _check_output(weights @ _repeat_for_heads(value, query), output, value)
    return weights


def _check_output(expected: Tensor, output: Tensor, scale: Tensor) -> None:
    """InputError if an output is not the expected one; NaN must be in both."""
    distance, largest = _find_largest(expected.float() - output.float()), _find_largest(scale.float())
    if distance > TOLERANCE.get(output.dtype, 1e-4) * largest:
        raise InputError(
            f"this attention's weights can't be recomputed: its kernel's output differs by {distance:.2g} "
            "from what they give",
            hint="ask for the layer's output",
        )


def _find_largest(value: Tensor) -> float:
    return float(value.abs().nan_to_num(0.0).amax()) if value.numel() else 0.0


def _compute_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The textbook's softmax(QKᵀ · scale + mask), in float32 at least; zero for a query that may look at nothing."""
    wide_query = query if query.dtype is torch.float64 else query.float()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keys = _repeat_for_heads(key, query).to(wide_query.dtype)
    scores = (wide_query @ keys.transpose(-2, -1)) * factor
    if is_causal:
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~earlier, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        masked = scores.isneginf().all(-1, keepdim=True)
        return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0).to(query.dtype)
    return scores.softmax(-1).to(query.dtype)


def _repeat_for_heads(value: Tensor, query: Tensor) -> Tensor:
    """Keys or values that several heads share, once for each of them."""
    if value.ndim < 3 or value.shape[-3] in (1, query.shape[-3]):
        return value
    return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)


def _is_over_keys(out: Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and out.ndim > 2 and dim % out.ndim == out.ndim - 1


def _holds(value: Any, tensor: Tensor) -> bool:
    return any(each is tensor for _, each in iterate_tensors(value))


def _reveal_to_modes(function: Any) -> Any:
    """A copy of a function that overrides see whole, whose own steps they see instead."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _reveal_to_modes(functional.multi_head_attention_forward)

SOFTMAXES = frozenset({functional.softmax, torch.softmax, torch.special.softmax, Tensor.softmax})
ATTENDING = SOFTMAXES | {functional.multi_head_attention_forward, functional.scaled_dot_product_attention}

# In inference mode operations come whole, elsewhere as the kernels that they are made of.
READERS: Mapping[str, Callable[[Any, Operands, Any], AttentionEvent | None]] = {
    **dict.fromkeys(("aten::softmax", "aten::_softmax", "aten::_safe_softmax"), _read_softmax),
    **dict.fromkeys(
        (
            "aten::scaled_dot_product_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
        ),
        _read_fused,
    ),
}


def keep_padding_zero(module: nn.Module) -> None:
    """Have all encoders in a module return 0 at the positions that only pad a row, as torch's own nested tensors do.

    Nested tensors are off for loaded models: hooks would see no dense tensor.
    """
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and part.layers and getattr(part, "use_nested_tensor", False):
            part.layers[-1].register_forward_hook(_zero_padding, with_kwargs=True)


def _zero_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The last layer's output as a nested tensor would be filled up behind it.

    None if torch makes no nested tensor: with a ``src_mask``, for a gradient by weights that are not frozen, under
    autocast, or if padding is not at the end of a row.
    """
    mask = kwargs.get("src_key_padding_mask")
    if mask is None or kwargs.get("src_mask") is not None or output.ndim != 3:
        return None
    if layer.training or torch.is_grad_enabled() or torch.is_autocast_enabled():
        return None
    padding = mask != 0  # the encoder makes any mask one to be added
    is_last = (padding[:, :-1] <= padding[:, 1:]).all(1, keepdim=True)
    return output.masked_fill((padding & is_last).unsqueeze(-1), 0.0)
