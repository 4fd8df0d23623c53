"""The configuration of a model, and the inputs that it takes; plain data, importable without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from layertap.models.grammar import SOURCES, is_checkpoint
from layertap.models.labels import Outputs

Pool = Literal["none", "mean", "mean_all", "max", "gem", "cls", "last", "flatten"]
ReplyDType = Literal["float32", "float16", "int8"]
Device = str
Shapes = tuple[tuple[int, ...], ...]  # of one row, input by input
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
MemoryFormat = Literal["contiguous", "channels_last"]
InputDType = Literal["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
Decode = Literal["exact", "fast", "device"]
Mode = Literal["eval", "train"]  # of a module, as torch has them
Compile = Literal[False, True, "always"]
Preprocessed = Literal["", "caller", "mixed"]  # by whom rows were preprocessed; empty if as configured
LeftPadding = Literal["as sent", "numbered", "refused"]  # how a model takes padding in front of a text
Truncate = Literal["none", "start", "end"]  # what is cut off a text that is too long; "none": it is refused
Tower = Literal["texts", "pictures"]  # of a model of two towers, by its input
Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels of a picture
Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Color = tuple[int, int, int]  # red, green, blue, from 0 to 255
ImageBackend = Literal["auto", "pil", "torchvision"]  # transformers' two kinds of image processor; auto: its own choice
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SMOOTH = frozenset({"bilinear", "bicubic", "lanczos"})  # the others do not average neighbouring pixels
OMITTED_IF_NONE = frozenset({"channels", "letterbox", "background", "scale", "crop_rounding"})  # from digests
FOR_TENSORS = frozenset({"bilinear", "bicubic"})  # the others exist for pictures only, or pick other pixels


@dataclass(frozen=True)
class PreprocessSpec:
    """How a picture becomes a row: resize, centre crop, scale to 0…1, normalise.

    ``resize``: the short side in pixels, or (height, width); ``crop``: a square's side, or (height, width);
    None skips the step. ``mean`` and ``std`` are per channel, on the scale of ``scale``: the values that 0 and 255
    become, 0 and 1 if None. ``channels``: if not red, green, blue. ``letterbox``: the picture is resized to fit into
    ``resize``, and this colour fills the rest. ``background``: the colour behind transparent pictures; None drops their
    alpha channel. ``crop_rounding``: a crop that can't be exactly centred begins half a pixel to the left and above;
    None: at the even pixel, as in torchvision.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Interpolation = "bilinear"
    channels: Literal["gray", "bgr"] | None = None
    letterbox: Color | None = None
    background: Color | None = None
    scale: tuple[float, float] | None = None
    crop_rounding: Literal["floor"] | None = None

    def __post_init__(self) -> None:
        """ValueError if steps contradict each other, or mean and std do not have one value for each channel."""
        sizes = [size for size in (self.resize, self.crop) if size is not None]
        for wrong, text in (
            (any(min(size) < 1 if isinstance(size, tuple) else size < 1 for size in sizes), "sizes are 1 or more"),
            (
                not len(self.mean) == len(self.std) == self.channel_count,
                "mean and std have a figure for each of three channels, of gray for the one",
            ),
            (
                not all(map(isfinite, (*self.mean, *self.std))) or not all(self.std),
                "mean and std are finite, and no std is 0",
            ),
            (self.letterbox and (self.resize is None or self.crop is not None), "letterbox needs resize, and no crop"),
            (self.scale and not all(map(isfinite, self.scale)), "scale is finite"),
            (
                self.scale and (self.mean == IMAGENET_MEAN or self.std == IMAGENET_STD),
                "mean and std are on the scale of scale: give them too",
            ),
            (
                not all(0 <= value < 256 for value in (*(self.letterbox or ()), *(self.background or ()))),
                "a colour is three numbers from 0 to 255",
            ),
        ):
            if wrong:
                raise ValueError(text)

    def describe(self) -> dict[str, Any]:
        """The steps as plain data, without unused newer fields: digests stay as they were before these existed."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in OMITTED_IF_NONE}

    @property
    def channel_count(self) -> int:
        """How many channels a row has."""
        return 1 if self.channels == "gray" else 3

    @property
    def reducible(self) -> bool:
        """Whether the resize filter is smooth, so that a picture decoded at a reduced scale gives nearly the same."""
        return self.resize is not None and self.interpolation in SMOOTH

    @property
    def placeable(self) -> bool:
        """Whether every step has a nearly equal version for tensors, so that a GPU can run it."""
        plain = self.channels is None and self.letterbox is None and self.scale is None
        return plain and (self.resize is None or self.interpolation in FOR_TENSORS)

    def changes_pixels(self, decode: Decode) -> bool:
        """Whether this ``decode`` gives other numbers than ``exact`` for some pictures."""
        return {"exact": False, "fast": self.reducible, "device": self.placeable}[decode]


@dataclass(frozen=True)
class InputSpec:
    """One input of a model: its argument's name, the shape of one item (no batch axis) and its dtype.

    ``values``: the range (start, stop) of integers that the model is surveyed with; an item may hold these, and any
    from 0 on. None: any, and 0 and 1 for the survey. ``longest``: axis ``long_axis`` of an item may have 1 to
    ``longest`` entries, the same in all such inputs; None: as in ``shape``. ``example``: the path of a .npz or .json
    file with rows, which replace noise when the model is surveyed and probed.
    A name with a dot, ``batch.ids``, is an entry of a dictionary.
    """

    name: str
    shape: tuple[int, ...]
    dtype: InputDType = "float32"
    values: tuple[int, int] | None = None
    longest: int | None = None
    long_axis: int = 0
    example: str | None = None

    def __post_init__(self) -> None:
        """ValueError if ``values`` is an empty range, or the shape is longer than ``longest``."""
        if self.values is not None and self.values[0] >= self.values[1]:
            raise ValueError("values are from the first figure up to, not including, the second")
        if self.longest is not None and (not self.shape or self.shape[self.long_axis] > self.longest):
            raise ValueError("'longest' must be at least shape[0]")

    @property
    def is_mask(self) -> bool:
        """Whether it says which tokens of a row are padding: 0, as in transformers."""
        return self.name.rpartition(".")[2] == "attention_mask" and len(self.shape) == 1


@dataclass(frozen=True)
class WarmSpec:
    """Frequently requested layers, prepared before the model is ready: selectors, and one reduction for all of them.

    With ``compile`` they get their own compiled graph, which takes minutes the first time. It answers requests for some
    or all of these layers, with the same reduction, if it is faster than hooks, or ``always``. ``cuda_graphs``: batch
    sizes for which a CUDA graph is captured.
    """

    layers: tuple[str, ...]
    pool: Pool = "none"
    normalize: bool = False
    dtype: ReplyDType = "float32"
    compile: Compile = False
    cuda_graphs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """ValueError if there are no layers, or a batch size is impossible."""
        if self.cuda_graphs and not self.compile:
            raise ValueError("cuda_graphs are of a compiled plan: set compile too")
        if any(size < 1 for size in self.cuda_graphs):
            raise ValueError("'cuda_graphs' must be row counts of 1 or more")


@dataclass(frozen=True)
class EmbeddingSpec:
    """The layer whose tensor is the model's embedding, and its pooling; ``pool`` None: one that gives a vector.

    ``layout`` names the tensor's axes, in place of what the survey finds.
    """

    layer: str
    pool: Pool | None = None
    normalize: bool = False
    layout: str | None = None


@dataclass(frozen=True)
class EmbeddingChoice:
    """A layer whose tensor is a model's embedding, and why; ``pool`` None: chosen so that a row becomes a vector.

    ``guessed``: the model itself does not say that this is its embedding.
    """

    layer: str
    reason: str
    pool: Pool | None = None
    normalize: bool = False
    guessed: bool = False
    layout: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """One entry of the configuration.

    ``source`` is ``KIND:IDENT`` (torchvision:resnet50, timm:vit_small_patch16_224, transformers:PATH,
    python:package.module:factory, python:PATH.py:factory);
    ``args`` are JSON values for the architecture's constructor, by name, such as ``num_classes``;
    ``weights`` is DEFAULT, a weights enum's name, a checkpoint's path, or random:SEED; only a checkpoint's tensors
    under ``prefix`` are read, and with ``strict`` their names must be exactly the module's; ``adapter`` is the
    folder of a PEFT adapter that is merged into them;
    ``required``: a server that loads it at startup is not ready without it. ``dtype``: that in which the model
    computes; ``auto``: float64 for a module whose floating tensors all are, else float32.
    ``inputs`` is needed if the source can't tell (python:). ``decode``: large JPEGs may be decoded at a reduced scale,
    and pictures resized with shorter weights (``fast``), or JPEGs decoded on the model's GPU (``device``): faster,
    with other numbers.
    ``labels``: the names of all classes in order, or the path of a file with them; None: those that the source
    knows. ``tf32``: on a GPU, float32 matrix products and convolutions may use 10 bits of each mantissa. torch has one
    switch for a process, so all its float32 models on GPUs must agree. ``memory_format``: of convolution weights, and
    so of their activations. ``devices``, instead of ``device``: the model is loaded on each of them,
    and their forwards take rows from one queue; ``all`` means all GPUs. ``cpu:0`` and ``cpu:1`` stand in for GPUs
    on machines without: a copy of the model for each, which runs one forward at a time.
    ``image_backend``: which of transformers' image processors makes the rows of pictures; ``auto``: the library's
    choice, or ``pil`` for another ``decode`` than exact, which needs steps of our own; ``interpolate_pos_encoding``:
    position tables of its vision transformers are interpolated for pictures of other sizes.
    ``idle_timeout_s``: seconds without a request after which a server unloads it; None: as its settings say.
    ``dimensions``: the lengths of shortened vectors that the model was trained for (Matryoshka).
    ``outputs``: whether class scores are logits or probabilities; None: as a forward shows at loading.
    ``mode``: ``train`` is for studying dropout and batch statistics; state that forwards write is restored. Rows run
    one by one unless a request is ``isolated``. LoadError if the model can't run a single row: batch norm over (1, C).
    ``projections``: paths of linear layers' checkpoints, keyed by the names that requests use.
    """

    name: str
    source: str
    weights: str = "DEFAULT"
    device: Device = "auto"
    devices: tuple[Device, ...] = ()
    dtype: DType = "auto"
    tf32: bool = False
    memory_format: MemoryFormat = "contiguous"
    load: Literal["startup", "lazy"] = "startup"
    required: bool = True
    embedding: EmbeddingSpec | str | None = None
    preprocess: Literal["preset", "none"] | PreprocessSpec = "preset"
    inputs: tuple[InputSpec, ...] | None = None
    warm: tuple[WarmSpec, ...] = ()
    decode: Decode = "exact"
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prefix: str = ""
    strict: bool = True
    adapter: str = ""
    labels: tuple[str, ...] | str | None = None
    idle_timeout_s: float | None = None
    image_backend: ImageBackend = "auto"
    interpolate_pos_encoding: bool = False
    dimensions: tuple[int, ...] = ()
    outputs: Outputs | None = None
    mode: Mode = "eval"
    projections: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """ValueError if an argument is no JSON value, a time is invalid, or an input's name is also a dictionary's."""
        names = [each.name for each in self.inputs or ()]
        if any(other.startswith(f"{name}.") for name in names for other in names):
            raise ValueError("an input is a dictionary, by its entries' names, or an input of its own, not both")
        if self.idle_timeout_s is not None and not 0 < self.idle_timeout_s < inf:
            raise ValueError("'idle_timeout_s' must be a number of seconds above 0")
        if any(each < 1 for each in self.dimensions):
            raise ValueError("dimensions are numbers from 1 on")
        try:
            json.dumps(self.args, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "args are values as JSON has them: numbers, texts, true, false, null, lists, mappings"
            ) from error

    @property
    def embedding_layer(self) -> str | None:
        """The selector of the configured embedding, None if there is none."""
        return self.embedding.layer if isinstance(self.embedding, EmbeddingSpec) else self.embedding

    @property
    def is_for_cpu(self) -> bool:
        """Whether no GPU may run it."""
        return all(device.partition(":")[0] == "cpu" for device in self.devices or (self.device,))

    @property
    def precision(self) -> str:
        """The precision in fingerprints: ``tf32`` or the dtype."""
        return ("tf32" if self.tf32 else "float32") if self.is_float32 else self.dtype

    @property
    def is_float32(self) -> bool:
        """Whether it computes in float32, as far as is known before it is built."""
        return self.dtype in ("auto", "float32")

    @property
    def downloads(self) -> bool:
        """Whether its weights come from the network, the first time."""
        source = SOURCES.get(self.source.partition(":")[0])
        local = self.weights.startswith("random:") or is_checkpoint(self.weights) or self._has_path
        return source is not None and source.downloads and not local

    @property
    def _has_path(self) -> bool:
        kind, _, ident = self.source.partition(":")
        return kind in SOURCES and bool(SOURCES[kind].find_path(ident))

    @property
    def shown_source(self) -> str:
        """``source`` as it may be shown to anyone: only the last part of a path."""
        kind, _, ident = self.source.partition(":")
        source = SOURCES.get(kind)
        return f"{kind}:{source.show(ident)}" if source is not None else self.source
