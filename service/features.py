"""The results of a request before encoding: numpy arrays, each with a receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import WithJsonSchema

from layertap.models.errors import Fault
from layertap.models.plan.requested import Combine, Sample
from layertap.models.spec import Preprocessed
from layertap.service.probes import Probe

Array = NDArray[Any]
# An array in the OpenAPI schema: some client generators mishandle a tuple of two.
GridSize = Annotated[tuple[int, int], WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The origin of one result, and what was done to it."""

    layer: str
    call: int
    module: str
    site: str
    path: str = ""  # leads into a structured value, such as "[logits]"
    layout: str | None = None
    captured: tuple[int | None, ...]  # shape in the hook, of one input if inputs differ; None: an axis that differs
    dtype: str  # in the hook, before pooling and casting
    pool: str
    grid: GridSize | None = None  # rows and columns that pixels or patches were averaged to
    sample: Sample | None = None  # entries that were kept of each pooled row
    normalize: bool = False
    fingerprint: str
    space: str = ""  # equal for vectors that may be compared; "" for maps and effects, and rows of several spaces
    function: str = ""  # such as "add#0", called by the layer
    row_axis: int | None = 0  # of the result; None: all rows share it
    entries_per_row: int = 1  # on that axis, side by side unless ``row_order`` says otherwise
    row_order: str = ""  # "forward": as a hook on the model sees them
    stats: tuple[str, ...] | None = None  # names of the columns
    by: str | None = None  # statistics are grouped by it
    over: str | None = None  # statistics are computed over it
    edges: tuple[float, ...] | None = None  # of a histogram's bins
    combine: Combine | None = None  # how the rows were made one result
    how: str = ""  # attention: "observed", "recomputed" beside a fused kernel, or "unfused" without that kernel
    resumed: str = ""  # the layer whose output was sent instead of the model's inputs
    input_shapes: tuple[tuple[int, ...], ...] | None = None  # of these, for one row
    forward: str = ""  # "compiled": by a warm plan's graph
    classes: tuple[int, ...] | None = None  # each row's top class, if the gradient is of it
    labels: tuple[str, ...] | None = None  # of ``classes``
    rows_per_forward: int | None = None  # if rows affect each other
    preprocessed: Preprocessed = ""  # "caller": rows were sent as tensors; "mixed": some were
    channels: tuple[int, ...] | None = None  # indices that were kept, in this order; so are those up to ``keys``
    tokens: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    token_counts: tuple[int, ...] | None = None  # of each text, without padding
    truncated: tuple[int, ...] | None = None  # tokens cut off each text, or samples off each sound, if any
    source_rates: tuple[int, ...] | None = None  # samples a second of each sound as it was sent
    source_frames: tuple[tuple[int, ...], ...] | None = None  # which frames of each video were taken
    source_seconds: tuple[tuple[float, ...], ...] | None = None  # when each of them is shown, if the file tells
    seconds_per_step: float | None = None  # along axis T or L of a sound's tensor, if known
    reply_dtype: str = "float32"
    prefix_tokens: int = 0  # tokens or attention keys before the patches
    grid_size: GridSize | None = None  # rows and columns of patches
    method: str = ""  # of the explanation whose map it is
    metric: str = ""  # the kind of objective that a sweep or an optimisation measured
    axes: tuple[str, ...] | None = None  # of what it measured, after the axis of inputs
    probe: Probe | None = None  # the result for the fixed input
    fingerprints: tuple[str, ...] | None = None  # of each row, if inputs of several shapes differ in it

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; default values are left out."""
        values = {key: value for key, value in vars(self).items() if key not in DEFAULTS or value != DEFAULTS[key]}
        return {key: asdict(value) if isinstance(value, Probe | Sample) else value for key, value in values.items()}


DEFAULTS = {each.name: each.default for each in fields(Receipt) if each.default is not MISSING}


@dataclass(frozen=True)
class TopClass:
    """One of a row's top classes: its raw score, and its name if known.

    ``probability`` is the softmax over all classes, None if there is only one class; ``activation`` names another
    function that made it of the score.
    """

    number: int
    score: float
    probability: float | None
    label: str | None = None
    activation: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        known = {"probability": self.probability, "activation": self.activation, "label": self.label}
        known = {name: value for name, value in known.items() if value is not None}
        return {"class": self.number, "score": self.score, **known}


@dataclass(frozen=True)
class TopEffect:
    """One of an input's largest effects in a sweep: key, indices along the axes, edited minus unedited."""

    key: str
    index: tuple[int, ...]
    effect: float


@dataclass(frozen=True)
class Features:
    """The results of one request."""

    model: str
    fingerprint: str
    rows: int  # inputs that were used
    arrays: dict[str, Array]  # C-contiguous and little-endian, in the order asked for
    receipts: dict[str, Receipt]
    scales: dict[str, Array] = field(default_factory=dict)  # float32 factors along axis 0, for int8 arrays
    errors: tuple[Fault, ...] = ()  # of inputs that were left out
    verified: bool = False  # captured outputs, put back in a second forward, reproduced the model's output
    interventions: tuple[tuple[str, ...], ...] = ()  # what each changed
    warnings: tuple[str, ...] = ()  # where results may mislead
    input_index: int | None = None  # of the single input, among inputs of several shapes
    by_input: frozenset[str] = frozenset()  # keys of results of one such input
    tokens: int = 0  # in all texts, special ones included, without padding
    cut: tuple[int, ...] = ()  # tokens or samples cut off each row, or 1 for a picture's unused pages; (): none
    top_classes: tuple[tuple[TopClass, ...], ...] = ()  # of each row, best first
    top_effects: tuple[tuple[TopEffect, ...], ...] = ()  # of each row, largest first
    pixels: Array | None = None  # of an optimised picture, uint8 (H, W, 3) or (H, W), if the reply is a picture
    texts: tuple[str, ...] = ()  # of each row's generated tokens

    @cached_property
    def space(self) -> str:
        """The space of all results, "" if they have several."""
        return get_common({receipt.space for receipt in self.receipts.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self.arrays.values(), *self.scales.values()))

    @property
    def skipped(self) -> tuple[int, ...]:
        """The indexes in the request of the inputs that were left out."""
        return list_skipped(self.errors)


def get_common(spaces: Iterable[str]) -> str:
    """The space that several are, "" if they differ."""
    first, *others = {*spaces} or {""}
    return "" if others else first


def list_skipped(faults: Iterable[Fault]) -> tuple[int, ...]:
    """The indexes of the inputs that faults name."""
    return tuple(sorted({fault.input for fault in faults if fault.input is not None}))


def merge_results(first: Features, second: Features, digest: Callable[[Iterable[str]], str]) -> Features:
    """Merge results of the same rows; ``digest`` combines the fingerprints of all receipts."""
    receipts = first.receipts | second.receipts
    return replace(
        first,
        fingerprint=digest(receipt.fingerprint for receipt in receipts.values()),
        arrays=first.arrays | second.arrays,
        receipts=receipts,
        warnings=tuple(dict.fromkeys(first.warnings + second.warnings)),
        by_input=first.by_input | second.by_input,
    )


def join_features(parts: Sequence[Features]) -> Features:
    """Join the features of several requests for the same layers of one model along the rows, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        rows=sum(part.rows for part in parts),
        arrays=_join_arrays([part.arrays for part in parts], first.receipts),
        scales=_join_arrays([part.scales for part in parts], first.receipts),
        errors=tuple(fault for part in parts for fault in part.errors),
        verified=all(part.verified for part in parts),
        warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
        tokens=sum(part.tokens for part in parts),
        cut=join_cuts(parts),
    )


def join_cuts(parts: Sequence[Features]) -> tuple[int, ...]:
    """How many tokens each row's text was truncated by; () if none was."""
    if not any(part.cut for part in parts):
        return ()
    return tuple(chain.from_iterable(part.cut or (0,) * part.rows for part in parts))


def _join_arrays(parts: Sequence[Mapping[str, Array]], receipts: Mapping[str, Receipt]) -> dict[str, Array]:
    return {key: _concatenate([part[key] for part in parts], receipts[key].row_axis) for key in parts[0]}


def _concatenate(arrays: Sequence[Array], axis: int | None) -> Array:
    return arrays[0] if axis is None else np.concatenate(arrays, axis)


def warn_of_cuts(features: Features) -> tuple[str, ...]:
    """A warning if texts or sounds were truncated, or pages left out."""
    count = sum(map(bool, features.cut))
    if count and any(receipt.source_rates for receipt in features.receipts.values()):
        return (f"{count} of {features.rows} sounds are longer than the model takes: their ends are left out",)
    of_pictures = f"{count} of {features.rows} pictures have several pages, of which only the first is used"
    of_texts = f"{count} of {features.rows} texts truncated, by up to {max(features.cut, default=0)} tokens"
    return (of_texts if features.tokens else of_pictures,) if count else ()
