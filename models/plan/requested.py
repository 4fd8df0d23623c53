"""The parts of a request, not yet looked up: selectors, and what is done with their tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal

from layertap.models.labels import Outputs
from layertap.models.points import AXES, EACH, Point, Site
from layertap.models.spec import Pool, ReplyDType

Op = Literal["zero", "scale", "add", "clamp", "relu", "square", "tanh", "replace", "noise"]
ObjectiveKind = Literal[
    "logit", "probability", "binary", "cross_entropy", "kl_div", "mse", "sum", "mean", "norm", "layer"
]
LossReduction = Literal["mean", "batchmean", "sum"]  # as in torch's losses
Terms = tuple[tuple[float, int], ...]  # (weight, class) or (weight, channel) pairs
By = Literal["channel", "head"]
BY_AXIS: dict[By, str] = {"channel": "C", "head": "A"}  # the axis's letter in a layout
Class = int | Literal["top"]  # an index, or the row's highest class
Method = Literal[
    "grad_cam",
    "grad_cam_plusplus",
    "hires_cam",
    "layer_cam",
    "xgrad_cam",
    "eigen_cam",
    "ablation_cam",
    "saliency",
    "guided_backpropagation",
    "integrated_gradients",
    "smoothgrad",
    "occlusion",
    "attention_rollout",
    "gradient_rollout",
    "relevance",
]
Rule = Literal["vit-explain", "pytorch-grad-cam"]  # the library whose arithmetic is used instead of the paper's


@dataclass(frozen=True)
class TensorData:
    """A tensor from outside: float32, little-endian ``data`` in C order."""

    shape: tuple[int, ...]
    data: bytes

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of ``data``."""
        return sha256(self.data).hexdigest()


@dataclass(frozen=True)
class LinearStep:
    """A linear map of channels as in torch.nn.Linear: ``weight`` (K, C), ``bias`` (K,), or only one of them.

    ``name`` names one of the model's projections; then both tensors are None until it is looked up.
    """

    weight: TensorData | None = None
    bias: TensorData | None = None
    relu: bool = False
    name: str = ""

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels it takes, and how many it returns."""
        tensor = self.weight or self.bias
        return (tensor.shape[-1], tensor.shape[0]) if tensor is not None else (0, 0)


Projection = tuple[LinearStep, ...]  # steps in order


@dataclass(frozen=True)
class Reduction:
    """What happens to a captured tensor on its device: project, narrow, pool, normalise, cast.

    Steps run in the order of the fields. ``project`` maps the channels to others, which the later steps see.
    ``channels`` to ``keys`` keep those indices along their axis, in the order given, negative ones counted from the
    end; the last three apply to attention. ``normalize`` is L2 over the last axis of a pooled result. ``stats`` are
    columns, in the order given, and replace pooling and all later steps: for each row, or for each of its channels or
    heads (``by``); ``over``: all rows of the request together; ``edges``: the edges of the histogram's bins.
    ``metric``: an objective's value for each row replaces everything else.
    """

    project: Projection | None = None
    channels: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    stats: tuple[str, ...] | None = None
    by: By | None = None
    over: Literal["inputs"] | None = None
    edges: tuple[float, ...] | None = None
    pool: Pool = "none"
    normalize: bool = False
    dtype: ReplyDType = "float32"
    metric: Objective | None = None

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The kept indices along each narrowed axis, by option name."""
        return _get_indices(self)

    @property
    def indices_by_axis(self) -> dict[str, Sequence[int]]:
        """``indices`` by the axis's letter in a layout."""
        return {AXES[option]: indices for option, indices in self.indices.items()}

    @property
    def is_by_row(self) -> bool:
        """Whether the result has one entry for each input on axis 0, however the tensor holds its rows."""
        return self.pool != "none" or self.stats is not None or self.metric is not None


@dataclass(frozen=True)
class FunctionCall:
    """A function that a layer's own forward calls, and which call; ``number`` None or "*": every call."""

    name: str
    number: int | Literal["*"] | None = None


@dataclass(frozen=True)
class Selector:
    """One entry of a request's ``layers``, parsed but not yet looked up.

    ``text`` is the request's own spelling; ``call`` None means the last call (in an intervention every call), "*" every
    call; ``path`` None means every tensor; ``alias`` is the key asked for by ``as``. ``function`` None means the layer
    itself. ``excluded``: points that a glob leaves out, each with the reason. ``layout`` names the axes of each tensor,
    in place of what the survey found.
    """

    text: str
    pattern: str
    call: int | Literal["*"] | None = None
    path: tuple[str, ...] | None = None
    site: Site = "output"
    type: str | None = None
    reduction: Reduction = Reduction()
    alias: str | None = None
    function: FunctionCall | None = None
    excluded: tuple[tuple[Point, str], ...] | None = None
    layout: str | None = None

    @property
    def is_glob(self) -> bool:
        """Whether several layers may match; their keys are then canonical names."""
        return self.type is not None or "*" in self.pattern or "?" in self.pattern


@dataclass(frozen=True)
class Embedding:
    """A model's embedding, asked for instead of layers or before them; ``layer``: a layer to use as the embedding.

    ``pool`` None: chosen so that a row becomes a vector. ``alias`` is the key asked for; None: its selector's text.
    """

    pool: Pool | None = None
    normalize: bool = False
    dtype: ReplyDType = "float32"
    layer: str = ""
    alias: str | None = None


@dataclass(frozen=True)
class TensorSource:
    """A tensor of another input of the request; ``input``: its index; ``selector`` None: the same point."""

    input: int
    selector: Selector | None = None


@dataclass(frozen=True)
class Operation:
    """How an activation is changed: ``op`` with its parameters, on the named part of the tensor.

    ``channels`` to ``keys`` are indices along their axis, the last three for attention; ``region`` is top, left,
    bottom, right in the layer's own pixels, the last two exclusive. None means everything. ``source``: the input whose
    tensor is used. ``each`` names options whose indices are changed one at a time, one in each row; ``row``: all rows
    get the noise of this row. ``project``: the value is replaced by its projection, or its projection is added.
    """

    op: Op
    by: float | None = None
    value: float | None = None
    min: float | None = None
    max: float | None = None
    std: float | None = None
    seed: int | None = None
    tensor: TensorData | None = None
    channels: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    region: tuple[int, int, int, int] | None = None
    source: TensorSource | None = None
    each: tuple[str, ...] | None = None
    row: int | None = None
    project: Projection | None = None

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The changed indices along each narrowed axis, by option name."""
        return _get_indices(self)

    @property
    def indices_by_axis(self) -> dict[str, Sequence[int]]:
        """``indices`` by the axis's letter in a layout, with the region's rows and columns."""
        by_axis: dict[str, Sequence[int]] = {AXES[option]: indices for option, indices in self.indices.items()}
        if self.region is not None:
            top, left, bottom, right = self.region
            by_axis |= {"H": range(top, bottom), "W": range(left, right)}
        return by_axis


@dataclass(frozen=True)
class Intervention:
    """One entry of a request's ``interventions``, not yet looked up."""

    selector: Selector
    operation: Operation


@dataclass(frozen=True)
class Objective:
    """What is differentiated: a number for each row, computed from the model's or a layer's output.

    ``klass`` is a class, several with weights, or "top", the default: the row's highest class. ``target`` has a number
    for each class: probabilities, or values for ``mse``; "unedited": what the same input gives without a sweep's edits.
    ``selector`` names a layer; ``channel``, for the kind ``layer``, is one of its channels, or several with weights
    (None: all). ``position``: a token of each row, or the row and column of a map; negative ones count from the end.
    ``reduction``: how a row's loss is reduced over its classes (None: the kind's default).
    ``outputs``: whether the model returns logits (None), probabilities or log probabilities.
    """

    kind: ObjectiveKind = "logit"
    klass: int | Literal["top"] | Terms | None = None
    target: tuple[float, ...] | Literal["unedited"] | None = None
    selector: Selector | None = None
    channel: int | Terms | None = None
    position: tuple[int, ...] | None = None
    reduction: LossReduction | None = None
    outputs: Outputs | None = None


@dataclass(frozen=True)
class InputOptions:
    """One input's options: an objective that replaces the request's, and interventions that run after the request's."""

    objective: Objective | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Edits that are tried one at a time at each of ``places``; an operation's ``each`` lists the axes to go through.

    ``values`` replace the operation's parameter ``number`` one after the other. ``top``: how many of an input's largest
    effects are named.
    """

    places: tuple[Intervention, ...]
    number: str = ""
    values: tuple[float, ...] = ()
    top: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes whose entries are tried one at a time."""
        names = {indices: name for name, indices in EACH.items()}
        return tuple(names[indices] for indices in self.places[0].operation.each or ())

    @property
    def tried(self) -> tuple[float | None, ...]:
        """The values of the operation's number, one after the other; None: its own."""
        return self.values or (None,)


@dataclass(frozen=True)
class InputBaseline:
    """The index of the input that serves as the baseline of others."""

    input: int


Baseline = float | Literal["blur"] | InputBaseline  # one value everywhere, the blurred picture, or another input


@dataclass(frozen=True)
class Explanation:
    """The requested maps: the methods, and the layer (None: each method chooses).

    ``classes`` replace the objective's class, with a map for each; ``top_classes``: how many of a row's best classes
    are named. ``discard``: the share of each layer's lowest attention that a rollout sets to 0, from 0 to below 1.
    Integrated gradients take ``steps`` and ``baseline``; SmoothGrad takes ``samples``, ``noise`` (a share of the row's
    range) and ``seed``; occlusion takes ``window`` and ``stride``, in the input's pixels, and ``baseline``; methods
    with a library's variant take ``rule``. None: the default.
    """

    methods: tuple[Method, ...]
    selector: Selector | None = None
    discard: float | None = None
    classes: tuple[Class, ...] = ()
    top_classes: int = 0
    steps: int | None = None
    samples: int | None = None
    noise: float | None = None
    seed: int | None = None
    window: int | None = None
    stride: int | None = None
    baseline: Baseline | None = None
    rule: Rule | None = None


def _get_indices(part: Reduction | Operation) -> dict[str, tuple[int, ...]]:
    return {option: vars(part)[option] for option in AXES if vars(part)[option] is not None}
