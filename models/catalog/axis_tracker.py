"""AxisTracker: follows the axes of every tensor through the operations of one forward, by a rule for each operation.

An operation without a rule returns unknown axes. No rule looks at numbers, or infers a kind from sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from layertap.models.catalog.axes import POSITION_LETTERS, Axes, Axis, make_axes, view_as
from layertap.models.catalog.taint import MarkedMemory
from layertap.models.devices.dispatch_mode import DispatchMode
from layertap.models.hooks.tensor_tree import iterate_tensors

Geometry = tuple[int, torch.Size, tuple[int, ...]]  # where a tensor's numbers lie in its memory
Rule = Callable[["Given", torch.Size], Axes]  # of what is returned, from its shape and what was given


class AxisTracker(DispatchMode):
    """While active, knows the axes of every tensor by its memory, whichever Python object refers to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes: MutableMapping[torch.UntypedStorage, dict[Geometry, Axes]] = WeakIdKeyDictionary()
        self._computed = MarkedMemory()  # of what is computed from the inputs
        self._rules: dict[object, tuple[Rule | None, tuple[str, ...]]] = {}  # with the names of what is given

    def start(self, inputs: Mapping[str, Tensor]) -> None:
        """Begin a forward that computes from these."""
        for tensor in inputs.values():
            self._set_axes(tensor, make_axes(tensor.shape), is_computed=True)

    def find(self, tensor: Tensor) -> Axes:
        """The axes of a tensor, one for each of its dimensions."""
        if not _has_memory(tensor):
            return make_axes(tensor.shape)
        known = self._get_known(tensor)
        return known.get(_locate(tensor)) or known.setdefault(_locate(tensor), make_axes(tensor.shape))

    def is_computed(self, value: object) -> bool:
        """Whether a tensor depends on the inputs of the forward, not on weights alone."""
        return _has_memory(value) and self._computed.has_any([value])

    def follow_recurrent(self, before: Axes, returned: object) -> None:
        """Join the axes of what one of torch's recurrent layers takes and returns, which computes step by step."""
        after = self.find(next(iterate_tensors(returned))[1])
        for one, other in zip(before[:-1], after[:-1], strict=False):
            one.join(other)
        note(after[:-1], "p")
        note((before[-1], after[-1]), "C")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and follow the axes through it."""
        options = kwargs or {}
        out = func(*args, **options)
        if func not in self._rules:
            self._rules[func] = _find_rule(func), tuple(argument.name for argument in func._schema.arguments)
        rule, names = self._rules[func]
        given = Given(dict(zip(names, args, strict=False)) | dict(options), self)
        returned = [each for each in (out if isinstance(out, tuple | list) else [out]) if _has_memory(each)]
        is_computed = any(map(self.is_computed, given.list_tensors()))
        if not returned or not (is_computed or func.is_view):  # of weights only views are followed
            return out
        try:
            axes = rule(given, returned[0].shape) if rule is not None else ()
        except (LookupError, TypeError, ValueError):  # an overload that the rule does not know
            axes = ()
        for tensor in returned:
            self._set_axes(tensor, axes, is_computed=is_computed)
        return out

    def _set_axes(self, tensor: Tensor, axes: Axes, *, is_computed: bool) -> None:
        known = self._get_known(tensor)
        if len(axes) == tensor.ndim:
            known[_locate(tensor)] = tuple(map(Axis.resize, axes, tensor.shape))
        if is_computed:
            self._computed.mark([tensor])

    def _get_known(self, tensor: Tensor) -> dict[Geometry, Axes]:
        """The axes of all tensors that share the memory of one."""
        return self._axes.setdefault(tensor.untyped_storage(), {})


def _has_memory(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested and not value.is_meta


def _locate(tensor: Tensor) -> Geometry:
    strides = (stride if size != 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()), tensor.shape, tuple(strides)


class Given(dict[str, Any]):
    """What an operation takes, by the names of its schema."""

    def __init__(self, values: Mapping[str, Any], tracker: AxisTracker) -> None:
        super().__init__(values)
        self.tracker = tracker

    def find(self, *names: str) -> Axes:
        """The axes of the tensor that has the first of these names."""
        return self.tracker.find(next(self[name] for name in names if name in self))

    def find_all(self, tensors: Sequence[Tensor]) -> list[Axes]:
        """The axes of each tensor."""
        return list(map(self.tracker.find, tensors))

    def list_tensors(self) -> Iterator[Tensor]:
        """All tensors in order, those of lists too."""
        for value in self.values():
            yield from (each for each in (value if isinstance(value, list | tuple) else [value]) if _has_memory(each))

    def list_dims(self, rank: int) -> list[int]:
        """The dimensions along which an operation works, all of ``rank`` where it names none."""
        dims = self.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        return [dim % max(rank, 1) for dim in dims] if dims else list(range(rank))


def _find_rule(func: Any) -> Rule | None:
    name = func._schema.name.split("::")[-1].removesuffix("_")
    found = (rule for pattern, rule in RULES.items() if re.fullmatch(pattern, name))
    return next(found, _join if torch.Tag.pointwise in func.tags else None)


def note(axes: Sequence[Axis], evidence: str) -> None:
    """An operation worked along these."""
    for axis in axes:
        axis.note(evidence)


def note_positions(axes: Sequence[Axis], evidence: str) -> None:
    """An operation took these for length, height and width, or time, height and width."""
    for axis, letter in zip(axes, POSITION_LETTERS.get(len(axes), [""]), strict=False):
        note([axis], evidence + letter)


def _join_all(operands: Sequence[Axes]) -> Axes:
    """The axes of what is computed entry by entry; those along which nothing is broadcast are of one kind."""
    found: list[Axis] = []
    for dim in range(-max(map(len, operands)), 0):
        here = [axes[dim] for axes in operands if len(axes) >= -dim]
        wide = [axis for axis in here if axis.size != 1] or here[:1]
        for axis in wide[1:]:
            wide[0].join(axis)
        found.append(next((axis for axis in wide if axis.parts), wide[0]))
    return tuple(found)


def _join(given: Given, shape: torch.Size) -> Axes:
    return _join_all(given.find_all(list(given.list_tensors())))


def _keep(given: Given, shape: torch.Size) -> Axes:
    """Each axis keeps its kind, whatever its size."""
    return given.find_all([next(given.list_tensors())])[0]


def _expand(given: Given, shape: torch.Size) -> Axes:
    axes = given.find("self")
    return (*make_axes(shape[: len(shape) - len(axes)]), *axes)


def _transpose(given: Given, shape: torch.Size) -> Axes:
    axes = list(given.find("self"))
    one, other = (given.get(name, default) for name, default in (("dim0", 0), ("dim1", len(axes) - 1)))
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def _insert(axes: Axes, axis: Axis, dim: int) -> Axes:
    dim %= len(axes) + 1
    return (*axes[:dim], axis, *axes[dim:])


def _drop(axes: Axes, dims: Sequence[int]) -> Axes:
    return tuple(axis for index, axis in enumerate(axes) if index not in dims)


def _squeeze(given: Given, shape: torch.Size) -> Axes:
    axes = given.find("self")
    return _drop(axes, [dim for dim in given.list_dims(len(axes)) if axes[dim].size == 1])


def _reduce(given: Given, shape: torch.Size) -> Axes:
    axes = given.find("self")
    return axes if given.get("keepdim") else _drop(axes, given.list_dims(len(axes)))


def _cat(given: Given, shape: torch.Size) -> Axes:
    operands = [axes for axes in given.find_all(given["tensors"]) if len(axes) == len(shape)]
    dim = given.get("dim", 0) % len(shape)
    for axes in operands[1:]:
        operands[0][dim].join(axes[dim])
    return _insert(_join_all([_drop(axes, [dim]) for axes in operands]), operands[0][dim], dim)


def _index(given: Given, shape: torch.Size) -> Axes:
    """An axis keeps its kind if one axis of indices selects from it; a table of indices brings its own axes."""
    axes, indices = given.find("self"), given["indices"]
    (dim,) = (dim for dim, each in enumerate(indices) if each is not None)
    taken = given.find_all([indices[dim]])[0]
    return (*axes[:dim], *(taken if len(taken) > 1 else [axes[dim]]), *axes[dim + 1 :])


def _embed(given: Given, shape: torch.Size) -> Axes:
    tokens = given.find("indices")
    note(tokens, "P")
    return (*tokens, Axis(shape[-1], "C"))


def _work(along: int, channels: str, positions: str, made: str, given: Given, shape: torch.Size) -> Axes:
    """An operation along channels, on axis ``along``, and along positions: the axes behind it, or before the last one.

    ``made`` is evidence for new channels of the result; empty if these are the same.
    """
    axes = list(given.find("input", "self", "X", "qx"))
    # Next to a single channel the positions may be anything: ECA convolves over channels, spectra have frequencies.
    if axes[along].size == 1:
        channels, positions = channels.lower(), positions.lower()
    note([axes[along]], channels)
    if along == -1:
        note(axes[:-1], positions)
    else:
        note_positions(axes[along:][1:], positions)
    if made:
        axes[along] = Axis(shape[along], made)
    return tuple(axes)


def _multiply(left: str, right: str, given: Given, shape: torch.Size) -> Axes:
    """A product of matrices: one with a weight works along channels, or mixes positions."""
    (*rows, inner), (*_, other_inner, columns) = given.find(left), given.find(right)
    if not given.tracker.is_computed(given[right]):
        note([inner], "c")
        note(rows, "p")
        columns = Axis(columns.size, "c")
    elif not given.tracker.is_computed(given[left]):
        note([other_inner], "c")
        note([columns], "p")
        rows[-1] = Axis(rows[-1].size, "c")
    elif len(shape) == 3:
        note((rows[0], given.find(right)[0]), "A")
    return (*rows, columns)


def _attend(given: Given, shape: torch.Size) -> Axes:
    query, key, value = given.find("query"), given.find("key"), given.find("value")
    note((query[-3], key[-3], value[-3]), "A")
    return (*query[:-1], value[-1])


def _unfold(given: Given, shape: torch.Size) -> Axes:
    """A list of blocks: the channels and positions of each become its channels."""
    *rows, channels, height, width = _work(-3, "C", "P", "", given, shape)
    inside = Axis.merge([channels, *map(Axis.resize, (height, width), given["kernel_size"])])
    note([inside], "C")
    return (*rows, inside, Axis.merge((height, width)))


def _normalize_last(given: Given, shape: torch.Size) -> Axes:
    if len(given["normalized_shape"]) > 1:
        return given.find("input")
    return _work(-1, "c" if given.get("weight") is None else "C", "p", "", given, shape)


RULES: Mapping[str, Rule] = {
    "(_unsafe_)?view|_?reshape(_alias|_copy)?": lambda given, shape: view_as(given.find("self"), shape),
    "expand|repeat": _expand,
    "permute": lambda given, shape: tuple(given.find("self")[dim] for dim in given["dims"]),
    "transpose|t": _transpose,
    "squeeze": _squeeze,
    "unsqueeze": lambda given, shape: _insert(given.find("self"), Axis(1), given["dim"]),
    "select|unbind": lambda given, shape: _drop(given.find("self"), [given.get("dim", 0) % (len(shape) + 1)]),
    "unfold": lambda given, shape: (*given.find("self"), given.find("self")[given["dimension"]]),
    "slice|narrow|(unsafe_)?split(_with_sizes)?|detach|alias|"
    "_?to_copy|clone|contiguous|lift_fresh|zero|fill|.*_like|_?(log_|safe_)?softmax|cum(sum|prod|max|min)|flip|roll|"
    "constant_pad_nd|(reflection|replication)_pad.*|index_(select|add|fill|copy|put)|_index_put_impl|gather|sort|topk|"
    "(masked_|slice_|select_)?scatter.*|(native_)?dropout|tril|triu|masked_fill|glu|hardswish|_?prelu.*|rrelu.*|"
    "log_sigmoid.*|_fft_.*|(native_)?channel_shuffle|fake_quantize.*|(de)?quantize.*|_native_multi_head_attention|"
    "_transformer_encoder_layer_fwd": _keep,
    "copy": _join,
    "(nan)?sum|mean|a?(max|min)|median|arg(max|min)|prod|any|all|(std|var)(_mean)?|(linalg_vector_)?norm|logsumexp": (
        _reduce
    ),
    "cat|concat": _cat,
    "stack": lambda given, shape: _insert(_join_all(given.find_all(given["tensors"])), Axis(0), given.get("dim", 0)),
    "index": _index,
    "embedding": _embed,
    "b?mm": partial(_multiply, "self", "mat2"),
    "_?addmm.*": partial(_multiply, "mat1", "mat2"),
    "baddbmm": partial(_multiply, "batch1", "batch2"),
    "(_?mkldnn_)?linear.*": partial(_work, -1, "c", "p", "c"),  # it may mix positions as well
    ".*conv(olution|_transpose|_depthwise)?[123]?d?(_overrideable)?(_relu)?": partial(_work, 1, "C", "P", "C"),
    "pixel_(un)?shuffle": partial(_work, -3, "C", "P", "C"),
    "im2col": _unfold,
    "(native_)?layer_norm|_?(fused_)?rms_norm": _normalize_last,
    ".*(batch|group|instance)_norm.*": partial(_work, 1, "C", "p", ""),
    "_?scaled_dot_product_.*": _attend,
    # No proof: these may be over channels as well.
    **{rf".*(pool|upsample_[a-z]+){count}d.*": partial(_work, -1 - count, "c", "p", "") for count in (1, 2, 3)},
}
