"""Construct a module in a thread without a change to what other threads compute.

torch has one default dtype and one generator of random numbers for the whole process, and who constructs a module often
sets the one and draws from the other. Within ``isolate_construction`` a thread has both for itself. For that, the
functions of torch that set or tell them are replaced once, when this file is imported, by ones that look at which
thread calls: elsewhere they do what they always did.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layertap.models.dispatch_mode import DispatchMode


class _ThreadState(threading.local):
    """What the calling thread has for itself: nothing, unless it constructs a module."""

    dtype: torch.dtype | None = None
    generator: torch.Generator | None = None


_own = _ThreadState()


@contextmanager
def isolate_construction(seed: int | None) -> Iterator[None]:
    """Construct a module inside: the CPU's random numbers start at ``seed``, and the process's own are left alone.

    Without a seed they are those that would be drawn next outside, and still will. A default dtype that is set inside
    holds inside, in this thread.
    """
    generator = torch.Generator()
    if seed is None:
        generator.set_state(_get_own_state())
    else:
        generator.manual_seed(seed)
    before = _own.dtype, _own.generator
    _own.dtype, _own.generator = _get_own_dtype(), generator
    try:
        with _ThreadDtype(), _ThreadGenerator():  # type: ignore[no-untyped-call]
            yield
    finally:
        _own.dtype, _own.generator = before


class _ThreadDtype(TorchFunctionMode):
    """Gives the thread's own default dtype to tensors whose dtype nobody names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, usual = dict(kwargs or {}), _get_default_dtype()
        if func in TRACED_INSIDE and torch._C._get_tracing_state() is not None:
            with torch._C._DisableTorchDispatch():  # they draw nothing
                return func(*args, **options)
        if _own.dtype is None or _own.dtype == usual:
            return func(*args, **options)
        if func in FACTORIES:
            if options.get("dtype") is None and _has_default(func, args, options, usual, _own.dtype):
                options["dtype"] = _own.dtype
            return func(*args, **options)
        result = func(*args, **options)
        if _is_promoted(func, args, options, result, usual):
            return _promote(func, args, options, _own.dtype)
        return result


class _ThreadGenerator(DispatchMode):
    """Draws random numbers on the CPU from the thread's own generator, by the same operations."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and options.get("generator") is None:
            drawing = _with_generator(func)
            if drawing is not None and _on_cpu(args, options):
                return drawing(*args, **options | {"generator": _own.generator})
        return func(*args, **options)


def _has_default(
    func: Any, args: tuple[Any, ...], options: dict[str, Any], usual: torch.dtype, own: torch.dtype
) -> bool:
    """Whether what a factory makes has the default dtype, as nothing that it is made of has another."""
    leaves = list(_iterate_values([*args, *options.values()])) if func in OF_DATA else [*args, *options.values()]
    named = [leaf.dtype for leaf in leaves if _is_floating(leaf) and (func in OF_DATA or isinstance(leaf, Tensor))]
    # Numbers have the default dtype; beside others the widest decides.
    numbers = func in OF_DATA and any(isinstance(leaf, float) for leaf in leaves)
    if named and not (numbers and all(dtype.itemsize < own.itemsize for dtype in named)):
        return False
    # On meta nothing is drawn and no memory is taken, but there are no values, which some look at.
    tried: Tensor = func(*args, **options | ({} if func in OF_DATA else {"device": "meta"}))
    return tried.dtype in (usual, own)  # operations that torch has in Python ask for the thread's own


def _iterate_values(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _iterate_values(each)
    else:
        yield value


def _is_floating(value: Any) -> bool:
    """Whether a tensor, an array or a number of numpy has a floating dtype; numpy's float64 is a number of Python."""
    dtype = None if isinstance(value, float) else getattr(value, "dtype", None)
    return bool(getattr(dtype, "is_floating_point", getattr(dtype, "kind", "") == "f"))


def _is_promoted(func: Any, args: tuple[Any, ...], options: dict[str, Any], result: object, usual: torch.dtype) -> bool:
    """Whether whole numbers became floating ones, of the default dtype, because an operation gives no whole ones."""
    if not isinstance(result, Tensor) or result.dtype != usual or func in CASTS or options.get("dtype") is not None:
        return False
    tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    return bool(tensors) and not any(value.is_floating_point() or value.is_complex() for value in tensors)


def _promote(func: Any, args: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype) -> Any:
    """The operation on whole numbers again, as numbers of the dtype: that is how it is done under that default."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else value

    def exact(value: Any) -> Any:
        return torch.tensor(value, dtype=dtype) if isinstance(value, float) else value

    try:
        return func(*map(cast, args), **{name: cast(value) for name, value in options.items()})
    except (RuntimeError, TypeError):  # takes truth values or indices only
        return func(*map(exact, args), **{name: exact(value) for name, value in options.items()}).to(dtype)


@functools.cache
def _with_generator(func: Any) -> Any | None:
    """The overload of a random operation that takes a generator, None where there is none."""
    names = _list_arguments(func) - {"generator"}
    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    return next((each for each in (func, *overloads) if _list_arguments(each) == names | {"generator"}), None)


def _list_arguments(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


def _on_cpu(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    device = next((value.device for value in args if isinstance(value, Tensor)), options.get("device"))
    return device is None or torch.device(device).type == "cpu"


_get_default_dtype, _set_default_dtype = torch.get_default_dtype, torch.set_default_dtype
_manual_seed = torch.random.manual_seed
_get_rng_state, _set_rng_state = torch.random.get_rng_state, torch.random.set_rng_state


@functools.wraps(_get_default_dtype)
def _get_own_dtype() -> torch.dtype:
    return _own.dtype or _get_default_dtype()


@functools.wraps(_set_default_dtype)
def _set_own_dtype(d: torch.dtype, /) -> None:
    if _own.dtype is None:
        _set_default_dtype(d)
    elif not d.is_floating_point:
        raise TypeError("only floating-point types are supported as the default type")
    else:
        _own.dtype = d


@functools.wraps(_manual_seed)
def _seed_own(seed: int) -> torch.Generator:
    if _own.generator is None:
        return _manual_seed(seed)
    torch.cuda.manual_seed_all(int(seed))  # a factory may construct on a GPU
    return _own.generator.manual_seed(int(seed))


@functools.wraps(_get_rng_state)
def _get_own_state() -> Tensor:
    return _get_rng_state() if _own.generator is None else _own.generator.get_state()


@functools.wraps(_set_rng_state)
def _set_own_state(new_state: Tensor) -> None:
    if _own.generator is None:
        _set_rng_state(new_state)
    else:
        _own.generator.set_state(new_state)


OF_DATA: frozenset[Callable[..., Any]] = frozenset(
    {torch.tensor, torch.as_tensor, torch.asarray, torch.sparse_coo_tensor}
)
FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.empty, torch.empty_permuted, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.eye),
        *(torch.rand, torch.randn, torch.normal, torch.arange, torch.range, torch.linspace, torch.logspace),
        *OF_DATA,
        torch.scalar_tensor,
        *(torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window),
        *(torch.fft.fftfreq, torch.fft.rfftfreq),
    }
)
# torch.jit.trace records what these are made of, which it does not find below a mode of dispatch.
TRACED_INSIDE: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.convolution, torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    }
)
CASTS = frozenset({Tensor.to, Tensor.float, Tensor.type, Tensor.view})  # name a dtype themselves
REPLACED: dict[str, Callable[..., Any]] = {
    "get_default_dtype": _get_own_dtype,
    "set_default_dtype": _set_own_dtype,
    "manual_seed": _seed_own,
    "get_rng_state": _get_own_state,
    "set_rng_state": _set_own_state,
}
for _library in (torch, torch.random):
    for _name, _function in REPLACED.items():
        if hasattr(_library, _name):
            setattr(_library, _name, _function)
# torch's compilers know these two by the function itself, and have to know what stands in their place.
_get_own_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]
torch.jit._builtins._register_builtin(_seed_own, "aten::manual_seed")
