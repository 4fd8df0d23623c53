"""The parts of a request: hook points, and what to do with the tensors there; plain data, needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal, TypeVar

from layertap.models.errors import escape
from layertap.models.hooks.sites import AXES, EACH, SITES, CallKey, Side, Site
from layertap.models.labels import Outputs

ReplyDType = Literal["float32", "float16", "int8"]
Pool = Literal["none", "mean", "mean_all", "max", "gem", "cls", "last", "flatten"]
Op = Literal["zero", "scale", "add", "clamp", "relu", "square", "tanh", "replace", "noise"]
ObjectiveKind = Literal[
    "logit", "probability", "binary", "cross_entropy", "kl_div", "mse", "sum", "mean", "norm", "layer"
]
LossReduction = Literal["mean", "batchmean", "sum"]  # of a loss, as torch has them
Terms = tuple[tuple[float, int], ...]  # a weight and a class, or a channel, each
By = Literal["channel", "head"]
BY_AXIS: dict[By, str] = {"channel": "C", "head": "A"}  # its letter in a layout
Class = int | Literal["top"]  # by its number, or the row's own highest
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
Rule = Literal["vit-explain", "pytorch-grad-cam"]  # whose arithmetic makes a map, where it is not the paper's
Module = TypeVar("Module")


@dataclass(frozen=True)
class HookPoint:
    """One tensor of one call of one layer: ``layer3.0.relu``, call 2, path ``()``, site ``output``.

    Or of a ``function`` that the layer calls in that call, by name and number: ``add#0``; "" for the layer itself.
    """

    layer: str
    call: int
    path: tuple[str, ...]
    site: Site
    function: str = ""

    @property
    def text(self) -> str:
        """The selector that names this and nothing else."""
        return f"{self.format_name(f'#{self.call}')}:{self.site}"

    def format_name(self, call: str = "") -> str:
        """Layer, function and path, with the layer's call as it is to be written."""
        return f"{self.layer}{call}{'/' if self.function else ''}{self.function}{format_path(self.path)}"

    @property
    def escaped_text(self) -> str:
        """The same in quotes, safe to show."""
        return escape(self.text)

    @property
    def side(self) -> Side:
        """The kind of hook that sees this value, or the one whose gradient it is."""
        return "function" if self.function else SITES[self.site].side

    @property
    def call_key(self) -> CallKey:
        """The call as this kind of hook names it."""
        return (self.call, self.function, SITES[self.site].side) if self.function else self.call

    def locate(self, modules: Mapping[str, Module]) -> tuple[Module, Side, CallKey, tuple[str, ...]]:
        """The location by module, as a tied one has several names; ``modules``: by name, the root as ``.``."""
        return modules[self.layer], self.side, self.call_key, self.path


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
    """A linear map of channels as torch.nn.Linear has it, ``weight`` (K, C) and ``bias`` (K,), or one of the two.

    ``name`` is one of the model's projections, before its tensors are looked up; then there is neither of the two.
    """

    weight: TensorData | None = None
    bias: TensorData | None = None
    relu: bool = False
    name: str = ""

    @property
    def channels(self) -> tuple[int, int]:
        """How many it takes, and how many it gives."""
        tensor = self.weight or self.bias
        return (tensor.shape[-1], tensor.shape[0]) if tensor is not None else (0, 0)


Projection = tuple[LinearStep, ...]  # steps in order


@dataclass(frozen=True)
class Reduction:
    """What happens to a captured tensor on its device: project, narrow, pool, normalise, cast.

    ``project`` maps its channels to others; all that follows is of these.
    ``channels`` to ``keys`` keep those indices along their axis, in the order given, negative ones counted from the
    end; the last three are of attention. The order of steps is the order of fields. ``normalize`` is L2 over the last
    axis of a pooled result. ``stats`` are columns in the order given, in place of pooling and all that follows it: of
    each row, or of each channel or head of it (``by``); ``over``: of all rows of the request together; ``edges``: of
    the histogram's bins. ``metric`` is the number of each row that an objective gives, in place of all else.
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
        """What is kept along each axis that is narrowed, by the option that says so."""
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
    """A function that a layer's own forward calls, and which of its calls; ``number`` None or "*": every one."""

    name: str
    number: int | Literal["*"] | None = None


@dataclass(frozen=True)
class Selector:
    """One entry of a request's ``layers``, parsed but not yet looked up.

    ``text`` is the request's own spelling; ``call`` None means the last one, "*" every one; ``path`` None means every
    tensor; ``alias`` is the key asked for by ``as``. Of an intervention's selector ``call`` None means every call.
    ``function`` None means the layer itself. A glob leaves the ``excluded`` points out, each for the reason beside it.
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
    excluded: tuple[tuple[HookPoint, str], ...] | None = None

    @property
    def is_glob(self) -> bool:
        """Whether several layers may match; their keys are then canonical names."""
        return self.type is not None or "*" in self.pattern or "?" in self.pattern


@dataclass(frozen=True)
class Embedding:
    """A model's own embedding, asked for in place of layers or before them, or what one ``layer`` gives as one.

    ``pool`` None: the one that makes a vector of it. ``alias`` is the key asked for; None: its selector's text.
    """

    pool: Pool | None = None
    normalize: bool = False
    dtype: ReplyDType = "float32"
    layer: str = ""
    alias: str | None = None


@dataclass(frozen=True)
class TensorSource:
    """A tensor of another input of the request, ``input`` being its place; without a selector at the same point."""

    input: int
    selector: Selector | None = None


@dataclass(frozen=True)
class Operation:
    """How a value in flight is changed: ``op`` with its own parameters, on the part of it that is named.

    ``channels`` to ``keys`` are indices along their axis, the last three of attention; ``region`` is top, left, bottom,
    right in the layer's own pixels, the last two not included. Each is everything where None. ``source`` says of which
    input a tensor is taken. ``each`` names options whose indices are changed one by one, row by row; ``row``: all rows
    get the noise of that one. ``project``: what the value is replaced by, or what is added, is the value projected.
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
        """What is changed along each axis that is narrowed, by the option that says so."""
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
    """What is differentiated: a number for each row, of the model's output or of one layer's.

    ``klass`` is a class, several with weights, or "top" for the row's own highest, which None comes to; ``target`` has
    a number for each class, a probability but for ``mse``; ``selector`` names a layer, and ``channel`` its channel, or
    several with weights (None: all of it), for the kind ``layer``.
    ``position`` is where it looks: a token of each row, or the row and the column of a map. Below 0 they count from the
    end. ``reduction`` is that of a row's loss over its classes (None: the kind's own).
    ``outputs``: what the numbers of classes are (None: logits).
    A ``target`` "unedited" is what the same input gives without the edits of a sweep.
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
    """One input's own options: an objective that replaces the request's, and further interventions after these."""

    objective: Objective | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Edits that are tried one by one: at each of ``places`` (whose operations name what is tried ``each`` by itself).

    ``values`` are tried in place of the operation's own number, ``number``. ``top``: how many of an input's largest
    effects are named.
    """

    places: tuple[Intervention, ...]
    number: str = ""
    values: tuple[float, ...] = ()
    top: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of what is tried one by one."""
        names = {indices: name for name, indices in EACH.items()}
        return tuple(names[indices] for indices in self.places[0].operation.each or ())

    @property
    def tried(self) -> tuple[float | None, ...]:
        """What takes the place of the operation's number, one after the other; None: nothing does."""
        return self.values or (None,)


@dataclass(frozen=True)
class InputBaseline:
    """An input of the request, by its index, that others are compared with."""

    input: int


Baseline = float | Literal["blur"] | InputBaseline  # one value everywhere, the picture blurred, or another one


@dataclass(frozen=True)
class Explanation:
    """Maps that are asked for: how each is made, and of which layer (None: the method's own choice).

    ``classes`` are in place of the objective's class, with a map of each; ``top_classes`` is how many of a row's best
    classes are named. ``discard`` is the share of each layer's lowest attention that a rollout leaves out, 0 up to, not
    including, 1. ``steps`` are those of integrated gradients; ``samples``, ``noise`` (a share of the row's range) and
    ``seed`` are of SmoothGrad; ``window`` and ``stride`` of occlusion, in the input's pixels; ``baseline`` is of it and
    of integrated gradients; ``rule`` of the methods that have it, beside others. None: the default.
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


def format_path(path: tuple[str, ...]) -> str:
    """A path as a selector writes it: ``[out][0]``."""
    return "".join(f"[{key}]" for key in path)
