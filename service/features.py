"""The results of a request before encoding: numpy arrays, each with a receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import WithJsonSchema

from layertap.models.errors import Fault
from layertap.models.spec import Preprocessed
from layertap.service.probes import Probe

Array = NDArray[Any]
# An array in the OpenAPI schema: some client generators mishandle a tuple of two.
GridSize = Annotated[tuple[int, int], WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Where one result came from and what was done to it.

    ``captured`` and ``dtype`` are those of the tensor the hook saw, before pooling and casting; where inputs have
    several shapes ``captured`` is that of one input, None where they differ, and ``fingerprints`` has each row's, where
    these do. ``path`` leads into a structured value ("[logits]") and is empty for a single tensor. ``function``
    ("add#0") is set if the value belongs to a function that the layer calls. ``row_axis`` is the axis of the result
    that holds the rows, None if all rows share it. Each row has ``entries_per_row`` consecutive entries on it, unless
    ``row_order`` is "forward": then in the order that a hook on the model sees. ``stats`` names the columns of
    statistics, ``by`` and ``over`` what they are grouped by and computed over, ``edges`` the bins of a histogram.
    ``how`` says where attention comes from: "observed" (the model's own softmax), "recomputed" (beside a fused kernel)
    or "unfused" (for its gradient or a change, without that kernel). ``resumed`` names the layer whose output was sent
    in place of the model's inputs. ``forward`` is "compiled" if a warm plan's graph answered. ``classes``: for
    gradients of the highest score, the top class of each row; ``labels`` their names. ``rows_per_forward`` is set if
    rows affect each other. ``token_counts``: how many tokens each text has without padding. ``truncated``: how many
    tokens each text was truncated by, if any was. ``channels`` to ``keys`` are the indices that were kept, in their
    order, and ``reply_dtype`` what the result was cast to. ``prefix_tokens``: how many tokens or attention keys precede
    the patches; ``grid_size``: rows and columns of patches, if known. ``probe``: the result for the fixed input, if
    requested. ``method``: the explanation method, if the result is its map. ``metric``: the kind of objective that a
    sweep measured; ``axes``: the axes after that of the inputs. ``preprocessed`` is "caller" if rows were sent as
    tensors, "mixed" if only some were.
    """

    layer: str
    call: int
    module: str
    site: str
    path: str = ""
    layout: str | None = None
    captured: tuple[int | None, ...]
    dtype: str
    pool: str
    normalize: bool = False
    fingerprint: str
    function: str = ""
    row_axis: int | None = 0
    entries_per_row: int = 1
    row_order: str = ""
    stats: tuple[str, ...] | None = None
    by: str | None = None
    over: str | None = None
    edges: tuple[float, ...] | None = None
    how: str = ""
    resumed: str = ""
    forward: str = ""
    classes: tuple[int, ...] | None = None
    labels: tuple[str, ...] | None = None
    rows_per_forward: int | None = None
    preprocessed: Preprocessed = ""
    channels: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    token_counts: tuple[int, ...] | None = None
    truncated: tuple[int, ...] | None = None
    reply_dtype: str = "float32"
    prefix_tokens: int = 0
    grid_size: GridSize | None = None
    method: str = ""
    metric: str = ""
    axes: tuple[str, ...] | None = None
    probe: Probe | None = None
    fingerprints: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; default values are left out."""
        values = {key: value for key, value in vars(self).items() if key not in DEFAULTS or value != DEFAULTS[key]}
        return values if self.probe is None else {**values, "probe": asdict(self.probe)}


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
    """The results of one request.

    ``arrays`` holds one C-contiguous little-endian array per key, in the order asked for; ``scales`` one float32 array
    for each int8 key, to multiply along axis 0; ``rows`` counts the inputs that were used; ``errors`` names the others.
    ``verified``: putting captured outputs back in a second forward reproduced the model's output. ``interventions``
    lists what each requested intervention changed. ``warnings`` say where an answer may mislead. ``input_index`` is set
    for features of a single input among inputs of several shapes; ``by_input`` has the keys of results of one such
    input. ``tokens`` counts all tokens of texts, special ones included, padding excluded; ``cut``: how many tokens each
    row's text was truncated by, or 1 for a picture whose pages were left out; () if none was. ``top_classes`` has each
    row's top classes, best first, ``top_effects`` its largest effects, if requested.
    """

    model: str
    fingerprint: str
    rows: int
    arrays: dict[str, Array]
    receipts: dict[str, Receipt]
    scales: dict[str, Array] = field(default_factory=dict)
    errors: tuple[Fault, ...] = ()
    verified: bool = False
    interventions: tuple[tuple[str, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    input_index: int | None = None
    by_input: frozenset[str] = frozenset()
    tokens: int = 0
    cut: tuple[int, ...] = ()
    top_classes: tuple[tuple[TopClass, ...], ...] = ()
    top_effects: tuple[tuple[TopEffect, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self.arrays.values(), *self.scales.values()))

    @property
    def skipped(self) -> tuple[int, ...]:
        """The indexes in the request of the inputs that were left out."""
        return list_skipped(self.errors)


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
    """A warning if texts were truncated, or pages left out."""
    count = sum(map(bool, features.cut))
    of_pictures = f"{count} of {features.rows} pictures have several pages, of which only the first is used"
    of_texts = f"{count} of {features.rows} texts truncated, by up to {max(features.cut, default=0)} tokens"
    return (of_texts if features.tokens else of_pictures,) if count else ()
