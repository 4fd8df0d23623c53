"""What one forward of a model does, layer by layer: measured once by a survey, then only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from layertap.models.devices.devices import FLOATS, TORCH_DTYPES
from layertap.models.labels import Outputs
from layertap.models.points import SITES, Point, Site
from layertap.models.spec import LeftPadding


@dataclass(frozen=True)
class Traits:
    """``state`` names the buffers and attributes (module, name) that forwards change, which are put back after each.

    ``stops``: whether a forward may be left midway; one that overwrites weights until it ends may not.
    ``deterministic``: whether the same row gives the same answer again. Of texts: ``pads``, whether one stays the same
    with padding behind it, beside a longer one; ``left_padding``, whether it does with padding in front: as it is sent,
    with its tokens numbered by the mask, or neither way. ``outputs`` names the returned tensors, by their paths, that
    are not logits.
    """

    state: tuple[tuple[str, str], ...] = ()
    stops: bool = True
    deterministic: bool = True
    pads: bool = True
    left_padding: LeftPadding = "as sent"
    outputs: tuple[tuple[tuple[str, ...], Outputs], ...] = ()


DEFAULT_TRAITS = Traits()
TENSORS = "[]"
# How many calls a layer makes (-1, ""), or one of its calls (its number) makes of a function (its name), or how many
# TENSORS that call returns.
CallCounts = Mapping[tuple[str, int, str], int]

BACKWARD_FACTOR = 3.0  # forwards that a forward with a backward takes as long as


@dataclass(frozen=True)
class TensorInfo:
    """One tensor that enters or leaves a module.

    ``shape`` is that of a forward of one row. ``row_axis`` is the axis that grows with the rows, ``shape[row_axis]``
    its entries per row (windowed attention folds several into one axis); None if the tensor is the same for all
    rows. A model may squeeze that axis away in a forward of one row. ``crosses_rows`` marks a tensor of which no part
    can be given to one row: its entries stand in another order, or it holds something of all of them; it means what it
    says only where its rows share a forward with no others. ``layout`` names the axes (NCHW, NTC …; NAQK of attention:
    heads, queries, keys), with ? for one that nothing proves, None if it would have no letter but N; a request may have
    given it (``layout_given``). ``prefix`` counts class and register tokens, of attention those among the
    keys; ``grid_size`` has the rows and columns in which the patches behind these stand, None if no map of the
    forward tells. ``source`` says where a forward without a graph has attention from: "observed" or "recomputed".
    ``token_axes`` have an entry for each token of a text: they grow with its length. The row axis is one of them where
    tokens are folded into it. ``merges_tokens``: another axis grows with it, whose entries are of several tokens.
    ``argument`` is the parameter that it was passed as, if it was in a lone argument.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    row_axis: int | None = 0
    crosses_rows: bool = False
    alone: bool = False
    layout: str | None = None
    prefix: int = 0
    source: str = ""
    token_axes: tuple[int, ...] = ()
    merges_tokens: bool = False
    grid_size: tuple[int, int] | None = None
    layout_given: bool = False
    argument: str = ""

    @property
    def is_floating(self) -> bool:
        """Whether its numbers are floating ones that can be changed and differentiated."""
        return self.dtype in FLOATS

    @property
    def entries_per_row(self) -> int:
        """Entries of the row axis that belong to one row."""
        return 1 if self.row_axis is None else self.shape[self.row_axis]

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
        return replace(self, shape=shape)

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
    """One side of a call: its place in the forward, the share of the forward's cost spent by then, its tensors.

    ``refused`` are the paths of tensors without plain memory, which are not captured, and their kinds: "sparse" …
    """

    order: float
    cost: float
    tensors: tuple[TensorInfo, ...]
    refused: tuple[tuple[tuple[str, ...], str], ...] = ()


@dataclass(frozen=True)
class Call:
    """One run of a module in a forward; ``attention`` holds the weights (N, heads, queries, keys) that it computes.

    ``sinks`` has what softmax gives to learned sinks, in place of keys, where there are any.
    ``functions`` has the calls of functions that it makes itself, by name and number, in their order. ``origins`` tells
    of inputs that others read too, by path, where they come from. ``is_view``: the function returns a
    view of its input; what replaces that view no longer shares the input's memory, for any row of the batch.
    """

    input: CallBoundary
    output: CallBoundary
    attention: CallBoundary | None = None
    functions: Mapping[str, Call] = field(default_factory=dict)
    sinks: CallBoundary | None = None
    origins: Mapping[tuple[str, ...], Point] = field(default_factory=dict)
    is_view: bool = False

    def contains(self, other: Call) -> bool:
        """Whether the other call begins within this one."""
        return self.input.order < other.input.order < self.output.order

    def get_boundary(self, site: Site) -> CallBoundary:
        """The side that a site looks at; one of no tensor where the call computes no attention."""
        boundaries = {
            **dict.fromkeys(("attention", "unfused"), self.attention),
            "input": self.input,
            "output": self.output,
            "attention_sink": self.sinks,
        }
        boundary = boundaries[SITES[site].hook]
        return boundary or replace(self.output, tensors=(), refused=())


@dataclass(frozen=True)
class Layer:
    """A module under one of its names (a tied module has several)."""

    name: str
    type: str
    is_leaf: bool
    parameters: int
    calls: tuple[Call, ...]
    hazards: tuple[str, ...]

    @property
    def share(self) -> float:
        """Its own share of the forward's cost, that of its parts included, over all of its calls."""
        return sum(call.output.cost - call.input.cost for call in self.calls)

    @property
    def has_attention(self) -> bool:
        """Whether it computes attention weights of its own."""
        return any(call.attention is not None for call in self.calls)


@dataclass(frozen=True)
class Costs:
    """What a whole forward takes, measured at warm-up.

    Of ``n`` rows about ``base + n * per_row`` seconds, on a CPU with one thread, and ``n * row_bytes`` bytes for inputs
    and intermediate values. ``speedup``: how much quicker one row is on all cores of a CPU; 1 if that does not pay.
    """

    base: float = 0.0
    per_row: float = 1e-6
    row_bytes: int = 1
    speedup: float = 1.0

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        """A forward of so many rows up to a share of its cost."""
        return depth * (self.base + rows * self.per_row)


@dataclass(frozen=True)
class Catalog:
    """Every layer by name, in execution order, those that never run last; for one shape of input.

    ``seconds``: one forward of one row. ``crosses_rows``: whether what else is in the batch may change a row's output;
    ``batches``: whether a forward takes several rows at all.
    ``start`` is the layer that forwards go on from, where they do not begin at the model's inputs; the catalog then
    has the tensors that follow from that layer's output alone. ``sizes_known``: whether the rows have that shape; where
    they may have another, sizes are an example.
    ``has_functions``: whether it tells what functions take and return. ``traits`` hold for rows of all shapes.
    ``tower``: which of two towers the rows are for. ``branches``: whether rows of other values may make other calls.
    """

    layers: Mapping[str, Layer]
    seconds: float
    crosses_rows: bool
    costs: Costs = Costs()
    start: str = ""
    batches: bool = True
    sizes_known: bool = True
    has_functions: bool = False
    traits: Traits = DEFAULT_TRAITS
    tower: str | None = None
    branches: bool = False

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

    def with_functions(self, other: Catalog) -> Catalog:
        """The same with what another survey of that shape tells of functions."""
        layers = dict(self.layers)
        for name, layer in self.layers.items():
            calls = other.layers[name].calls
            if len(calls) == len(layer.calls):  # or the model runs otherwise each time
                pairs = zip(layer.calls, calls, strict=True)
                found = (replace(call, functions=same.functions, origins=same.origins) for call, same in pairs)
                layers[name] = replace(layer, calls=tuple(found))
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


def _delay(call: Call, later: int) -> Call:
    """A call like another, the ``later``-th behind it."""
    end = call.output.order + later * 1e-6
    return replace(call, input=replace(call.input, order=end - 5e-7), output=replace(call.output, order=end))
