"""Attention weights: which operations compute them, how those are observed, how weights are replaced or differentiated.

Weights are what softmax gives for each query over its keys; what a model then drops of them are sinks. A kernel that
fuses softmax with what stands around it shows none: they are computed beside it, and must explain what the kernel
returned.
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
from torch.utils._pytree import tree_leaves, tree_map

from layertap.models.devices.dispatch_mode import DispatchMode
from layertap.models.errors import InputError
from layertap.models.hooks.own_code import run_own

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
# How far a kernel's output may lie from what the weights give, as a part of the largest value.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Arguments = Mapping[str, Any]


@dataclass
class Sinks:
    """How many of the last keys are none: they take weight and have no value, so the model drops their weights."""

    count: int = 0


@dataclass(frozen=True)
class AttentionEvent:
    """One attention as an operation computed it: weights of a shape (…, queries, keys).

    ``evidence`` is a tensor that has the rows where the weights have them. ``how``: "observed" where the weights were
    there to be read, "recomputed" where a kernel hid them. ``weights`` gives a copy, at once or never: what comes later
    in the forward may write to what it looks at. It raises InputError if weights do not explain the output.
    ``sinks`` are counted by the operation that follows, which drops their weights.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    evidence: Tensor
    source: str
    weights: Callable[[], Tensor]
    sinks: Sinks = field(default_factory=Sinks)


class AttentionObserver(DispatchMode):
    """Shows every attention that is computed inside, and changes nothing."""

    def __init__(self, observe: Callable[[AttentionEvent], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe
        self._latest: AttentionEvent | None = None  # of the operation before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
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
        self._anchored: list[tuple[Tensor, Tensor]] = []  # results of softmax, and what goes on in their place

    def settle(self, value: Any) -> Any:
        """A value with anchored weights in it."""
        if self._waiting is not None and _holds(value, self._waiting):
            waiting, self._waiting = self._waiting, None
            self._anchored.append((waiting, self._anchor(waiting)))
        for before, after in self._anchored:
            if _holds(value, before):
                value = tree_map(lambda item, before=before, after=after: after if item is before else item, value)
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
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
    """How many of the last keys are missing in what was made of weights; 0 if it is no such part of them."""
    if not isinstance(kept, Tensor) or kept.shape[:-1] != weights.shape[:-1]:
        return 0
    is_first = kept.data_ptr() == weights.data_ptr() and kept.stride() == weights.stride()
    return weights.shape[-1] - kept.shape[-1] if is_first else 0


def is_attention(module: nn.Module) -> bool:
    """Whether a module's class says that it is attention."""
    name = type(module).__name__.lower()
    return isinstance(module, nn.MultiheadAttention) or "attention" in name or "attn" in name


def find_owner(running: Sequence[nn.Module]) -> nn.Module:
    """Of the modules that are running, outermost first, the one whose attention it is."""
    return next((module for module in reversed(running) if is_attention(module)), running[-1])


def find_nested_attention(module: nn.Module) -> list[nn.Module]:
    """The parts of a module whose attention is not the module's own."""
    return [
        part for part in module.modules() if part is not module and (is_attention(part) or not is_attention(module))
    ]


def unfold_weights(shape: tuple[int, ...], module: nn.Module) -> tuple[int, ...] | None:
    """Weights of a module as (N, heads, queries, keys), windows among the rows; None if they are no attention.

    Of three axes the first may hold rows and heads; elsewhere than in attention that is taken for something else. Where
    a module says how many heads it has, they stand before the queries, and nowhere else.
    """
    heads = [size for name in HEADS if isinstance(size := getattr(module, name, None), int) and size > 0]
    if len(shape) >= 4:
        if heads and (shape[-3] not in heads or any(size in heads for size in shape[1:-3])):
            return None
        return (math.prod(shape[:-3]), *shape[-3:])
    if len(shape) != 3 or not is_attention(module):
        return None
    count = next((size for size in heads if shape[0] % size == 0), 1)
    return (shape[0] // count, count, *shape[1:])


def _read_softmax(func: Any, arguments: Arguments, out: Tensor) -> AttentionEvent | None:
    if out.is_nested or not _is_over_keys(out, arguments["dim"]):
        return None
    return AttentionEvent(tuple(out.shape), out.dtype, out, "observed", out.clone)


def _read_fused(func: Any, arguments: Arguments, out: Any) -> AttentionEvent | None:
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
    """InputError if an output is not what the weights give; what is not a number is so on both sides."""
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
    return any(item is tensor for item in tree_leaves(value))


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
READERS: Mapping[str, Callable[[Any, Arguments, Any], AttentionEvent | None]] = {
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
    """Have all encoders in a module return 0 at the positions that only pad a row, where torch's own do.

    They do so by nested tensors, which are off where models are loaded: hooks would see no dense tensor.
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
