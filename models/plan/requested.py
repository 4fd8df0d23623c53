"""The parts of a request, not yet looked up: selectors, and what is done with their tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal

from layertap.models.labels import Outputs
from layertap.models.points import AXES, EACH, Grid, Point, Site
from layertap.models.spec import Pool, ReplyDType

Op = Literal["zero", "scale", "add", "clamp", "relu", "square", "tanh", "replace", "noise"]
ObjectiveKind = Literal[
    "logit", "probability", "binary", "cross_entropy", "kl_div", "mse", "sum", "mean", "norm", "layer"
]
LossReduction = Literal["mean", "batchmean", "sum"]  # as in torch's losses
Terms = tuple[tuple[float, int], ...]  # (weight, class) or (weight, channel) pairs
By = Literal["channel", "head"]
Combine = Literal["sum", "mean", "mean_square", "dot"]
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
    "score_cam",
    "saliency",
    "guided_backpropagation",
    "integrated_gradients",
    "smoothgrad",
    "occlusion",
    "attention_rollout",
    "gradient_rollout",
    "relevance",
]
Measure = Literal["cka", "rsa", "procrustes", "gram", "hsic"]
Baseline = float | Literal["blur", "input"]  # one value everywhere, the blurred picture, or an input of the request
StepRule = Literal["sgd", "adam", "sign", "scaled"]
Rule = Literal["vit-explain", "pytorch-grad-cam"]  # the library whose arithmetic is used instead of the paper's


@dataclass(frozen=True)
class TensorData:
    """A tensor from outside: float32, little-endian ``data`` in C order.

    ``kept``: the server keeps it for many requests, so that devices and workers keep a copy.
    """

    shape: tuple[int, ...]
    data: bytes
    kept: bool = field(default=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of ``data``."""
        return sha256(self.data).hexdigest()


@dataclass(frozen=True)
class LinearStep:
    """A linear map of channels as in torch.nn.Linear: ``weight`` (K, C), ``bias`` (K,), or only one of them.

    ``name`` names one of the model's or the server's; then both tensors are None until it is looked up.
    ``relu``, ``threshold`` (one number, or (K,)) and ``top_k`` then set some of the K results to 0.
    """

    weight: TensorData | None = None
    bias: TensorData | None = None
    relu: bool = False
    name: str = ""
    threshold: TensorData | None = None
    top_k: int | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels it takes, and how many it returns."""
        tensor = self.weight or self.bias
        return (tensor.shape[-1], tensor.shape[0]) if tensor is not None else (0, 0)


Projection = tuple[LinearStep, ...]  # steps in order


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a tensor: indices along its axes, negative ones counted from the end; None: all."""

    channels: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None  # like the next one, of attention only
    keys: tuple[int, ...] | None = None

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The indices along each narrowed axis, by option name."""
        return {option: vars(self)[option] for option in AXES if vars(self)[option] is not None}

    @property
    def indices_by_axis(self) -> dict[str, Sequence[int]]:
        """``indices`` by the axis's letter in a layout."""
        return {AXES[option]: indices for option, indices in self.indices.items()}


@dataclass(frozen=True)
class Sample:
    """Entries of a vector of n: ``numpy.random.default_rng(seed).choice(n, units, replace=False)``, in this order."""

    units: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Reduction(Part):
    """What happens to a captured tensor on its device: project, average, narrow, pool, sample, normalise, cast.

    ``metric`` replaces everything else; ``stats`` replace pooling and all later steps.
    """

    project: Projection | None = None  # maps the channels to others, which the later steps see
    grid: Grid | None = None  # averages pixels or patches to so many rows and columns: (N, C, rows, columns)
    stats: tuple[str, ...] | None = None  # columns in this order, for each row
    by: By | None = None  # statistics of each channel or head of a row
    over: Literal["inputs"] | None = None  # statistics of all rows of the request together
    edges: tuple[float, ...] | None = None  # of the histogram's bins
    combine: Combine | None = None  # all rows of the request into one result, after every other step
    pool: Pool = "none"
    sample: Sample | None = None  # entries of a pooled row
    normalize: bool = False  # L2, over the last axis of a pooled result
    dtype: ReplyDType = "float32"
    metric: Objective | None = None  # an objective's value for each row

    @property
    def is_by_row(self) -> bool:
        """Whether the result has one entry for each input on axis 0, however the tensor holds its rows."""
        return self.pool != "none" or any(each is not None for each in (self.grid, self.stats, self.metric))

    @property
    def is_of_heads(self) -> bool:
        """Whether it needs an axis for heads."""
        return self.heads is not None or self.by == "head"


@dataclass(frozen=True)
class Selector:
    """One entry of a request's ``layers``, parsed but not yet looked up."""

    text: str  # the request's own spelling
    pattern: str
    call: int | Literal["*"] | None = None  # "*": every call; None: the last one, in an intervention every one
    path: tuple[str, ...] | None = None  # None: every tensor
    site: Site = "output"
    type: str | None = None
    reduction: Reduction = Reduction()
    alias: str | None = None  # the key asked for by ``as``
    function: str | None = None  # that the layer calls: one call of it (``add#0``), or every one (``add``)
    excluded: tuple[tuple[Point, str], ...] | None = None  # points that a glob leaves out, each with the reason
    layout: str | None = None  # the letters of each tensor's axes, instead of those that the survey found
    leaf: bool | None = None  # only layers without layers inside; False: only the others

    @property
    def is_glob(self) -> bool:
        """Whether several layers may match; their keys are then canonical names."""
        return self.type is not None or self.leaf is not None or "*" in self.pattern or "?" in self.pattern


@dataclass(frozen=True)
class Embedding:
    """A model's embedding, asked for instead of layers or before them."""

    pool: Pool | None = None  # None: one that makes a vector of each row
    normalize: bool = False
    dtype: ReplyDType = "float32"
    layer: str = ""  # a layer to use as the embedding
    alias: str | None = None  # the key asked for; None: the selector's text


@dataclass(frozen=True)
class TensorSource:
    """A tensor of another input of the request; ``input``: its index; ``selector`` None: the same point."""

    input: int
    selector: Selector | None = None


@dataclass(frozen=True)
class Operation(Part):
    """How an activation is changed: ``op`` with its parameters, on the named part of the tensor."""

    op: Op
    by: float | None = None
    value: float | None = None
    min: float | None = None
    max: float | None = None
    std: float | None = None
    seed: int | None = None
    tensor: TensorData | None = None
    region: tuple[int, int, int, int] | None = None  # top, left, bottom, right in the layer's pixels, the end exclusive
    source: TensorSource | None = None  # where the tensor comes from, if it is another input's
    each: tuple[str, ...] | None = None  # options whose indices are changed one at a time, one in each row
    row: int | None = None  # all rows get the noise of this row
    project: Projection | None = None  # the value is replaced by its projection, or its projection is added

    @property
    def indices_by_axis(self) -> dict[str, Sequence[int]]:
        """``indices`` by the axis's letter in a layout, with the region's rows and columns."""
        by_axis = super().indices_by_axis
        if self.region is not None:
            top, left, bottom, right = self.region
            by_axis |= {"H": range(top, bottom), "W": range(left, right)}
        return by_axis

    @property
    def is_of_heads(self) -> bool:
        """Whether it needs an axis for heads."""
        return self.heads is not None or "heads" in (self.each or ())


@dataclass(frozen=True)
class Intervention:
    """One entry of a request's ``interventions``, not yet looked up."""

    selector: Selector
    operation: Operation


@dataclass(frozen=True)
class Objective:
    """What is differentiated: a number for each row, computed from the model's or a layer's output."""

    kind: ObjectiveKind = "logit"
    klass: Class | Terms | None = None  # a class, several with weights, or "top", the default
    target: tuple[float, ...] | Literal["unedited"] | None = None  # by class; "unedited": of the row without edits
    selector: Selector | None = None  # a layer; None: the model's output
    channel: int | Terms | None = None  # of a layer: one channel, or several with weights; None: all
    position: tuple[int, ...] | None = None  # a token, or a map's row and column; negatives count from the end
    reduction: LossReduction | None = None  # of a row's loss over its classes; None: the kind's default
    outputs: Outputs | None = None  # what the model returns for classes; None: logits
    over: int | Literal["inputs"] | None = None  # it is the mean over so many inputs, or over all of the request


@dataclass(frozen=True)
class InputOptions:
    """One input's options: an objective that replaces the request's, and interventions that run after the request's."""

    objective: Objective | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Edits that are tried one at a time at each of ``places``; an operation's ``each`` lists the axes."""

    places: tuple[Intervention, ...]
    number: str = ""  # the operation's parameter that ``values`` replace one after the other
    values: tuple[float, ...] = ()
    top: int = 0  # how many of an input's largest effects are named
    window: int = 1  # how many adjacent places are edited at once
    attribution: bool = False  # all edits are estimated by one gradient

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
class Optimisation:
    """Steps that raise an objective by changing the model's input; numbers are in its scale, or in shares of pixels."""

    steps: int
    learning_rate: float
    rule: StepRule = "sgd"
    minimise: bool = False  # lower the objective
    jitter: int = 0  # the most pixels by which the input is rolled before a step
    seed: int = 0
    total_variation: float = 0.0  # weights of penalties
    l2: float = 0.0
    clamp: tuple[float, float] | None = None
    epsilon: float | None = None  # the largest difference from the beginning
    pixels: bool = False  # numbers are for pixels from 0 to 1, before the model's preprocessing


@dataclass(frozen=True)
class Explanation:
    """The requested maps; None, and an empty tuple, stand for a method's default."""

    methods: tuple[Method, ...]
    selector: Selector | None = None  # the layer
    discard_ratio: float | None = None  # the share of each layer's lowest attention that a rollout sets to 0
    classes: tuple[Class, ...] = ()  # instead of the objective's class, with a map for each
    top_classes: int = 0  # how many of a row's best classes are named
    steps: int | None = None  # of integrated gradients
    samples: int | None = None  # of SmoothGrad, like ``noise`` (a share of the row's range) and ``seed``
    noise: float | None = None
    seed: int | None = None
    window: int | None = None  # of occlusion, like ``stride``, in the input's pixels
    stride: int | None = None
    baseline: Baseline | None = None
    baseline_input: int = 0  # the index of the input that "input" stands for
    rule: Rule | None = None  # of methods with a library's variant


@dataclass(frozen=True)
class Comparison:
    """How alike layers place the same inputs: by which measures, and to which other layers they are compared."""

    measures: tuple[Measure, ...]
    model: str | None = None
    selectors: tuple[Selector, ...] = ()  # of ``model``; none: each layer is compared to all that are asked for
