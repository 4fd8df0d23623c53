"""What one forward of a model does, layer by layer: measured once by a survey, then only read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from layertap.models.devices.devices import FLOATS, TORCH_DTYPES
from layertap.models.labels import Outputs
from layertap.models.points import SITES, Point, Site
from layertap.models.spec import LeftPadding


@dataclass(frozen=True)
class Traits:
    """What holds for rows of all shapes."""

    # The buffers and attributes (module, name) that forwards change, which are put back after each.
    state: tuple[tuple[str, str], ...] = ()
    stops: bool = True  # a forward may be left midway; one that overwrites weights until it ends may not
    deterministic: bool = True  # the same row gives the same answer again
    pads: bool = True  # a text stays the same with padding behind it, beside a longer one
    left_padding: LeftPadding = "as sent"  # how a text with padding in front stays the same
    outputs: tuple[tuple[tuple[str, ...], Outputs], ...] = ()  # returned tensors that are no logits, by path
    batch_axes: tuple[str, ...] = ()  # inputs on whose axis 1 rows do not affect each other, as they do on axis 0


DEFAULT_TRAITS = Traits()
TENSORS = "[]"
# How many calls a layer makes (-1, ""), or one of its calls (its number) makes of a function (its name), or how many
# TENSORS that call returns.
CallCounts = Mapping[tuple[str, int, str], int]

BACKWARD_FACTOR = 3.0  # forwards that a forward with a backward takes as long as


@dataclass(frozen=True)
class TensorInfo:
    """One tensor that enters or leaves a module."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # of a forward of one row; a model may squeeze the row axis away there
    dtype: str
    # The axis that grows with the rows; windowed attention folds several entries of a row into it. None if the tensor
    # is the same for all rows.
    row_axis: int | None = 0
    crosses_rows: bool = False  # its rows can't be separated: they stand in another order, or it is of all of them
    single_row: bool = False  # it means what it says only in a forward of one row
    layout: str | None = None  # a letter for each axis, ? for one that nothing proves; None if none but N is known
    prefix: int = 0  # class and register tokens, of attention those among the keys
    source: str = ""  # of attention in a forward without a graph: "observed" or "recomputed"
    # The axes that have an entry for each token of a text. The row axis is one of them where tokens are folded into it.
    token_axes: tuple[int, ...] = ()
    merges_tokens: bool = False  # another axis grows with a text, whose entries are of several tokens
    grid_size: tuple[int, int] | None = None  # rows and columns of the patches; None if no map of the forward tells
    layout_given: bool = False  # by the request
    heads: int = 0  # that its channels hold side by side; 0 if it is not known to
    heads_unfolded: bool = False  # as here, not as in the forward: with an axis for heads before the channels of each
    argument: str = ""  # the parameter that it was passed as, if it was in a lone argument
    origin: Point | None = None  # of an input that others read too: where it comes from

    @property
    def is_floating(self) -> bool:
        """Whether its numbers are floating ones that can be changed and differentiated."""
        return self.dtype in FLOATS

    @property
    def entries_per_row(self) -> int:
        """Entries of the row axis that belong to one row."""
        return 1 if self.row_axis is None else self.shape[self.row_axis]

    @property
    def is_by_row(self) -> bool:
        """Whether it has one entry for each row, on its first axis, and rows can be told apart."""
        return self.row_axis == 0 and self.entries_per_row == 1 and not self.crosses_rows

    @property
    def nbytes(self) -> int:
        """Bytes of one row's tensor as the model holds it."""
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize

    def has_axis(self, letter: str) -> bool:
        """Whether it is known to have an axis, by layout letter."""
        return self.layout is not None and letter in self.layout

    def axis(self, letter: str) -> int:
        """The axis that has a letter in the layout; ValueError if none has."""
        return (self.layout or "").index(letter)

    def size(self, letter: str) -> int:
        """Entries along that axis, in a forward of one row; ValueError if there is none."""
        return self.shape[self.axis(letter)]

    def with_length(self, tokens: int | None) -> TensorInfo:
        """The same of a text of so many tokens; None: as it is."""
        if tokens is None or not self.token_axes:
            return self
        shape = tuple(tokens if axis in self.token_axes else size for axis, size in enumerate(self.shape))
        return self if shape == self.shape else replace(self, shape=shape)

    def with_heads(self) -> TensorInfo:
        """The same with an axis for the heads that its channels hold; as it is if none are known."""
        if not self.heads or self.heads_unfolded or self.size("C") % self.heads:
            return self
        axis, layout = self.axis("C"), (self.layout or "").replace("C", "AC")
        return replace(
            self,
            shape=(*self.shape[:axis], self.heads, self.shape[axis] // self.heads, *self.shape[axis + 1 :]),
            layout=layout,
            row_axis=layout.index("N"),
            token_axes=tuple(each + (each > axis) for each in self.token_axes),
            heads_unfolded=True,
        )

    def index_select(self, indices_by_axis: Mapping[str, Sequence[int]]) -> TensorInfo:
        """The same with some indices along some axes, by layout letter; ValueError if it has no such axis."""
        shape = list(self.shape)
        for letter, indices in indices_by_axis.items():
            shape[self.axis(letter)] = len(indices)
        return replace(self, shape=tuple(shape)) if indices_by_axis else self

    def shape_for(self, rows: int) -> tuple[int, ...]:
        """The shape in a forward of ``rows`` rows."""
        return tuple(size * rows if axis == self.row_axis else size for axis, size in enumerate(self.shape))


@dataclass(frozen=True)
class CallBoundary:
    """One side of a call."""

    order: float  # when it was reached in the forward
    cost: float  # the share of the forward's cost spent by then
    tensors: tuple[TensorInfo, ...]
    refused: tuple[tuple[tuple[str, ...], str], ...] = ()  # tensors without plain memory, and their kinds: "sparse" …


@dataclass(frozen=True)
class Call:
    """One run of a module, or of a function in it."""

    input: CallBoundary
    output: CallBoundary
    attention: CallBoundary | None = None  # the weights (N, heads, queries, keys) that it computes
    functions: Mapping[str, Call] = field(default_factory=dict)  # that it calls itself, by name and number, in order
    attention_sink: CallBoundary | None = None  # what softmax gives to learned sinks instead of keys
    # A function's output is a view of its input; what replaces it no longer shares the input's memory.
    is_view: bool = False

    def contains(self, other: Call) -> bool:
        """Whether the other call begins within this one."""
        return self.input.order < other.input.order < self.output.order

    @property
    def boundaries(self) -> dict[Site, CallBoundary | None]:
        """Its sides by the site that looks at each; None where the call computes no attention."""
        attention, attention_sink = self.attention, self.attention_sink
        return {"input": self.input, "output": self.output, "attention": attention, "attention_sink": attention_sink}

    def get_boundary(self, site: Site) -> CallBoundary:
        """The side that a site looks at; one of no tensor where the call computes no attention."""
        boundary = self.boundaries[SITES[site]]
        return boundary or replace(self.output, tensors=(), refused=())


@dataclass(frozen=True)
class Layer:
    """A module under one of its names (a tied module has several)."""

    name: str
    type: str
    is_leaf: bool
    parameters: int
    calls: tuple[Call, ...]
    hazards: tuple[str, ...]  # "inplace", "scripted" or "never_called", "attention"
    weight_gradients: tuple[TensorInfo, ...] = ()  # of its parameters, and of those of parts that it does not call

    @property
    def share(self) -> float:
        """Its own share of the forward's cost, that of its parts included, over all of its calls."""
        return sum(call.output.cost - call.input.cost for call in self.calls)

    @property
    def has_attention(self) -> bool:
        """Whether it computes attention weights itself."""
        return any(call.attention is not None for call in self.calls)


@dataclass(frozen=True)
class Costs:
    """What a whole forward takes, measured at warm-up: of n rows about ``base + n * per_row`` seconds on one thread."""

    base: float = 0.0
    per_row: float = 1e-6
    row_bytes: int = 1  # for the inputs and intermediate values of a row
    speedup: float = 1.0  # how much quicker one row is on all cores of a CPU; 1 if that does not pay

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        """A forward of so many rows up to a share of its cost."""
        return depth * (self.base + rows * self.per_row)


@dataclass(frozen=True)
class Catalog:
    """What a forward does with rows of one shape."""

    layers: Mapping[str, Layer]  # by name, in the order in which they first run, those that never run last
    seconds: float  # of a forward of one row
    crosses_rows: bool  # what else is in the batch may change a row's output
    costs: Costs = Costs()
    # The point that forwards resume from, if they do: the tensors are those that follow from it alone.
    start: str = ""
    batches: bool = True  # a forward takes several rows
    sizes_known: bool = True  # else rows may have another shape, and sizes are an example
    has_functions: bool = False  # it tells what functions take and return
    traits: Traits = DEFAULT_TRAITS
    tower: str | None = None  # which of two towers the rows are for
    branches: bool = False  # rows of other values may make other calls

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The tensors that the model returns."""
        return self.layers["."].calls[0].output.tensors

    @cached_property
    def unsized(self) -> Catalog:
        """The same for rows of a shape that was not surveyed."""
        return replace(self, sizes_known=False)

    def with_calls(self, counts: CallCounts) -> Catalog:
        """The same of a forward that makes other numbers of calls: further ones are taken to be like the last."""
        layers = dict(self.layers)
        for (name, number, function), count in sorted(counts.items()):
            layer, calls = layers[name], list(layers[name].calls)
            if not function:
                calls[count:] = [_delay(calls[-1], later) for later in range(1, count - len(calls) + 1)]
            else:
                named = [key for key in calls[number].functions if key.rpartition("#")[0] == function]
                last = calls[number].functions[named[-1]]
                further = {f"{function}#{each}": _delay(last, each) for each in range(len(named), count)}
                kept = {key: each for key, each in calls[number].functions.items() if key not in named[count:]}
                calls[number] = replace(calls[number], functions=kept | further)
            layers[name] = replace(layer, calls=tuple(calls))
        return replace(self, layers=layers)

    def with_shapes(self, shapes: Mapping[Point, tuple[int, ...]]) -> Catalog:
        """The same of a forward whose tensors have these shapes."""
        boundaries = self.boundaries
        for point, shape in shapes.items():
            side = Point(point.layer, point.call, (), SITES[point.site])
            before = boundaries[side]
            tensors = (replace(each, shape=shape) if each.path == point.path else each for each in before.tensors)
            boundaries[side] = replace(before, tensors=tuple(tensors))
        return replace(self.with_boundaries(boundaries), sizes_known=True) if shapes else self

    @property
    def boundaries(self) -> dict[Point, CallBoundary]:
        """Each side of each call by point, under all names of a tied module; those of functions are left out."""
        return {
            Point(name, number, (), site): boundary
            for name, layer in self.layers.items()
            for number, call in enumerate(layer.calls)
            for site, boundary in call.boundaries.items()
            if boundary is not None
        }

    def with_boundaries(self, boundaries: Mapping[Point, CallBoundary]) -> Catalog:
        """The same with these sides of the same calls, and no functions."""
        calls = make_calls(boundaries)
        layers = {name: replace(layer, calls=tuple(calls[name])) for name, layer in self.layers.items()}
        return replace(self, layers=layers, has_functions=False)

    def with_functions(self, other: Catalog) -> Catalog:
        """The same with the functions, and the origins of inputs, of another survey of that shape."""
        layers = dict(self.layers)
        for name, layer in self.layers.items():
            calls = other.layers[name].calls
            if len(calls) == len(layer.calls):  # or the model runs otherwise each time
                pairs = zip(layer.calls, calls, strict=True)
                layers[name] = replace(layer, calls=tuple(_join_functions(*pair) for pair in pairs))
        return replace(self, layers=layers, has_functions=True)

    @property
    def graph_costs(self) -> Costs:
        """What a forward with a backward takes, expected rather than measured: a backward is two forwards' work.

        What a graph keeps of a row is counted as what all layers without parts take and return, and as much again for
        gradients.
        """
        saved = sum(
            info.nbytes
            for layer in self.layers.values()
            if layer.is_leaf
            for call in layer.calls
            for boundary in (call.input, call.output)
            for info in boundary.tensors
        )
        costs = self.costs
        return replace(
            costs,
            base=BACKWARD_FACTOR * costs.base,
            per_row=BACKWARD_FACTOR * costs.per_row,
            row_bytes=costs.row_bytes + 2 * saved,
        )

    @property
    def types(self) -> tuple[str, ...]:
        """The class names of all layers, sorted."""
        return tuple(sorted({layer.type for layer in self.layers.values()}))


def make_calls(boundaries: Mapping[Point, CallBoundary], views: Set[Point] = frozenset()) -> dict[str, list[Call]]:
    """The calls of each layer from their sides and those of functions, by point; ``views``: functions' outputs."""
    sides = defaultdict[Point, dict[Site, CallBoundary]](dict)
    for point, boundary in boundaries.items():
        sides[replace(point, site="output")][point.site] = boundary
    layers = defaultdict[str, list[Call]](list)
    functions = defaultdict[tuple[str, int], dict[str, Call]](dict)
    for point in sorted(sides, key=lambda point: not point.function):  # functions first
        its = sides[point]
        if point.function:
            if "output" in its and its["output"].tensors:  # else it raised, or returned no tensor
                call = Call(its["input"], its["output"], is_view=point in views)
                functions[point.layer, point.call][point.function] = call
        else:
            own, sinks = functions[point.layer, point.call], its.get("attention_sink")
            layers[point.layer].append(Call(its["input"], its["output"], its.get("attention"), own, sinks))
    return layers


def _join_functions(call: Call, other: Call) -> Call:
    """A call with the functions and origins that another survey saw."""
    origins = {info.path: info.origin for info in other.input.tensors}
    tensors = tuple(replace(info, origin=origins.get(info.path)) for info in call.input.tensors)
    return replace(call, functions=other.functions, input=replace(call.input, tensors=tensors))


def _delay(call: Call, later: int) -> Call:
    """A call like another, the ``later``-th behind it."""
    end = call.output.order + later * 1e-6
    return replace(call, input=replace(call.input, order=end - 5e-7), output=replace(call.output, order=end))
