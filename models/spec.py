"""The configuration of a model, and the inputs that it takes; plain data, importable without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
Window = tuple[int, int, int, int]  # left, top, width, height
Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Color = tuple[int, int, int]  # red, green, blue, from 0 to 255
ImageBackend = Literal["auto", "pil", "torchvision"]  # transformers' two kinds of image processor; auto: its own choice
MAX_STOP = 16
TOKENS_MASK, PADDING_MASK = "attention_mask", "src_key_padding_mask"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SMOOTH = frozenset({"bilinear", "bicubic", "lanczos"})  # the others do not average neighbouring pixels
FOR_TENSORS = frozenset({"bilinear", "bicubic"})  # the others exist for pictures only, or pick other pixels


@dataclass(frozen=True)
class PreprocessSpec:
    """How a picture becomes a row: resize, centre crop, scale to 0…1, normalise; None skips a step."""

    resize: int | tuple[int, int] | None = None  # the short side in pixels, or (height, width)
    crop: int | tuple[int, int] | None = None  # a square's side, or (height, width)
    mean: tuple[float, ...] = IMAGENET_MEAN  # per channel, on the scale of ``scale``
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Interpolation = "bilinear"
    channels: Literal["gray", "bgr"] | None = None  # None: red, green, blue
    letterbox: Color | None = None  # the picture is resized to fit into ``resize``, and this colour fills the rest
    background: Color | None = None  # the colour behind transparent pictures; None drops their alpha channel
    scale: tuple[float, float] | None = None  # the values that 0 and 255 become; None: 0 and 1
    crop_rounding: Literal["floor"] | None = None  # of a crop's start, to the left and above; None: as in torchvision

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
        """The steps as plain data."""
        return asdict(self)

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

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of every row, or None if they depend on the picture."""
        size = self.crop or (self.resize if self.letterbox or isinstance(self.resize, tuple) else None)
        return None if size is None else list_sides(size)

    def compute_resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a ``width`` x ``height`` picture after the resize step.

        Check it before resizing: enlarging the short side of a thin picture makes the long side huge.
        """
        if self.resize is None:
            return width, height
        if self.letterbox is not None:  # the largest of the same ratio, rounded as in ``PIL.ImageOps.contain``
            high, wide = list_sides(self.resize)
            if width * high > wide * height:
                return wide, max(round(height / width * wide), 1)
            return max(round(width / height * high), 1), high
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        short, long = sorted((width, height))
        longer = int(self.resize * long / short)
        return (self.resize, longer) if width <= height else (longer, self.resize)

    def find_window(self, wide: int, high: int) -> Window:
        """The window of a resized picture that a row has; left and top are negative if it begins outside of it."""
        size = self.crop if self.letterbox is None else self.resize
        if size is None:
            return 0, 0, wide, high
        height, width = list_sides(size)
        return self._find_start(wide, width), self._find_start(high, height), width, height

    def _find_start(self, length: int, size: int) -> int:
        """The start of a centred window, rounded as in torchvision (two ways), transformers or ``ImageOps.pad``."""
        if self.letterbox is not None:
            return -round((size - length) / 2)
        if self.crop_rounding == "floor":
            return (length - size) // 2
        return -((size - length) // 2) if size > length else round((length - size) / 2)

    def find_seen_box(self, width: int, height: int) -> Box:
        """The part of a ``width`` x ``height`` picture that a model sees, in pixels of that picture.

        If the crop is larger than the resized picture, the box extends beyond the picture.
        """
        wide, high = self.compute_resized_size(width, height)
        left, top, across, down = self.find_window(wide, high)
        scale_x, scale_y = width / wide, height / high
        return left * scale_x, top * scale_y, (left + across) * scale_x, (top + down) * scale_y


def list_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True)
class InputSpec:
    """One input of a model."""

    name: str  # of an argument of forward; with a dot, ``batch.ids``, an entry of a dictionary
    shape: tuple[int, ...]  # of one item, without a batch axis
    dtype: InputDType = "float32"
    values: tuple[int, int] | None = None  # integers of a survey: (start, stop); None: 0 and 1. An item may hold any
    longest: int | None = None  # axis ``long_axis`` may have 1 to ``longest`` entries; None: as many as in ``shape``
    long_axis: int = 0
    batch_axis: int | None = None  # of a batch, where its rows are joined; None: 0, if the survey finds no better one
    as_list: bool = False  # the forward takes a list of items, and gets one at a time: others would change its tensors
    example: str | None = None  # a .npz or .json file with rows, which replace noise in surveys and probes

    def __post_init__(self) -> None:
        """ValueError if ``values`` is an empty range, or the shape is longer than ``longest``."""
        if self.values is not None and self.values[0] >= self.values[1]:
            raise ValueError("values are from the first figure up to, not including, the second")
        if not 0 <= (self.batch_axis or 0) <= len(self.shape):
            raise ValueError("'batch_axis' is an axis of a batch, which has one more than 'shape': 0, 1 …")
        if self.longest is not None and not 0 <= self.long_axis < len(self.shape):
            raise ValueError("'long_axis' is an axis of 'shape', counted from 0")
        if self.longest is not None and self.length > self.longest:
            raise ValueError(f"'longest' must be at least shape[{self.long_axis}]")

    @property
    def length(self) -> int:
        """Entries along the axis that may have other lengths."""
        return self.shape[self.long_axis]

    def with_length(self, length: int) -> InputSpec:
        """The same with so many entries along that axis."""
        axis = self.long_axis
        return replace(self, shape=(*self.shape[:axis], length, *self.shape[axis + 1 :]))

    @property
    def is_mask(self) -> bool:
        """Whether it says which tokens of a row are padding: 0 as in transformers, or true as in torch."""
        return self.name.rpartition(".")[2] in (TOKENS_MASK, PADDING_MASK) and len(self.shape) == 1


@dataclass(frozen=True)
class Generation:
    """How many tokens come after a text, and how each is chosen.

    ``temperature``: 0 takes the likeliest token. Otherwise tokens are drawn, from the ``top_k`` likeliest (0: all) and
    of these from the likeliest whose probabilities sum to ``top_p``, by a CPU generator of seed ``seed`` + n for row n.
    ``stop``: the ids after which a text ends, at most MAX_STOP; None: the model's own.
    """

    steps: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WarmSpec:
    """Frequently requested layers, prepared before the model is ready."""

    layers: tuple[str, ...]
    pool: Pool = "none"  # one reduction for all of them
    normalize: bool = False
    dtype: ReplyDType = "float32"
    # They get a compiled graph, which takes minutes the first time. It answers requests for some or all of these layers
    # with the same reduction, if it is faster than hooks, or ``always``.
    compile: Compile = False
    cuda_graphs: tuple[int, ...] = ()  # batch sizes for which a CUDA graph is captured

    def __post_init__(self) -> None:
        """ValueError if there are no layers, or a batch size is impossible."""
        if self.cuda_graphs and not self.compile:
            raise ValueError("cuda_graphs are of a compiled plan: set compile too")
        if any(size < 1 for size in self.cuda_graphs):
            raise ValueError("'cuda_graphs' must be row counts of 1 or more")


@dataclass(frozen=True)
class EmbeddingSpec:
    """The layer whose tensor is the model's embedding, and its pooling."""

    layer: str
    pool: Pool | None = None  # None: one that gives a vector
    normalize: bool = False
    layout: str | None = None  # the names of the tensor's axes, instead of those that the survey finds


@dataclass(frozen=True)
class ModelSpec:
    """One entry of the configuration."""

    name: str
    source: str  # KIND:IDENT, as torchvision:resnet50, transformers:PATH, python:package.module:factory
    weights: str = "DEFAULT"  # or a weights enum's name, a checkpoint's path, random:SEED
    device: Device = "auto"
    # Instead of ``device``: a copy on each, whose forwards take rows from one queue. ``all``: all GPUs. ``cpu:0`` and
    # ``cpu:1`` stand in for GPUs on machines without.
    devices: tuple[Device, ...] = ()
    dtype: DType = "auto"  # of the computation; auto: float64 for a module whose floating tensors all are, else float32
    # float32 matrix products and convolutions on a GPU may use 10 bits of each mantissa. torch has one switch for a
    # process, so all its float32 models on GPUs must agree.
    tf32: bool = False
    memory_format: MemoryFormat = "contiguous"  # of convolution weights, and so of their activations
    load: Literal["startup", "lazy"] = "startup"
    required: bool = True  # a server that loads it at startup is not ready without it
    embedding: EmbeddingSpec | str | None = None
    preprocess: Literal["preset", "none"] | PreprocessSpec = "preset"
    inputs: tuple[InputSpec, ...] | None = None  # needed if the source can't tell (python:)
    warm: tuple[WarmSpec, ...] = ()
    # fast: large JPEGs are decoded at a reduced scale, pictures resized with shorter weights; device: JPEGs are decoded
    # on the model's GPU. Both give other numbers.
    decode: Decode = "exact"
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)  # JSON values for the constructor, by name
    sound_rate: int | None = None  # its only input is the samples of sounds, so many a second
    constants: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further arguments of forward, JSON values
    prefix: str = ""  # only a checkpoint's tensors under it are read
    strict: bool = True  # the checkpoint's names must be exactly the module's
    adapter: str = ""  # the folder of a PEFT adapter that is merged into the weights
    labels: tuple[str, ...] | str | None = None  # the classes in order, or a file of them; None: the source's
    idle_timeout_s: float | None = None  # without requests, until a server unloads it; None: as its settings say
    # Which of transformers' image processors makes the rows of pictures; auto: the library's choice, or ``pil`` for
    # another ``decode`` than exact, which needs steps of our own.
    image_backend: ImageBackend = "auto"
    interpolate_pos_encoding: bool = False  # of transformers' vision models, for pictures of other sizes
    dimensions: tuple[int, ...] = ()  # the lengths of shortened vectors that the model was trained for (Matryoshka)
    outputs: Outputs | None = None  # whether class scores are logits or probabilities; None: as a forward shows
    # ``train`` is for studying dropout and batch statistics; state that forwards write is restored. Rows run one by one
    # unless a request is ``isolated``. LoadError if the model can't run a single row: batch norm over (1, C).
    mode: Mode = "eval"
    projections: Mapping[str, str] = field(default_factory=dict, hash=False)  # paths of linear layers' checkpoints

    def __post_init__(self) -> None:
        """ValueError if an argument is no JSON value, a time is invalid, or an input's name is also a dictionary's."""
        names = [each.name for each in self.inputs or ()]
        if any(other.startswith(f"{name}.") for name in names for other in names):
            raise ValueError("an input is a dictionary, by its entries' names, or an input of its own, not both")
        if self.idle_timeout_s is not None and not 0 < self.idle_timeout_s < inf:
            raise ValueError("'idle_timeout_s' must be a number of seconds above 0")
        if self.sound_rate is not None and self.sound_rate < 1:
            raise ValueError("sound_rate is a number of samples a second, from 1 on")
        if any(each < 1 for each in self.dimensions):
            raise ValueError("dimensions are numbers from 1 on")
        for name in ("args", "constants"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{name} are values as JSON has them: numbers, texts, true, false, null, lists, mappings"
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
        if source is None or not source.downloads or source.find_path(self.source.partition(":")[2]):
            return False
        return not self.weights.startswith("random:") and not is_checkpoint(self.weights)

    @property
    def shown_source(self) -> str:
        """``source`` as it may be shown to anyone: only the last part of a path."""
        kind, _, ident = self.source.partition(":")
        source = SOURCES.get(kind)
        return f"{kind}:{source.show(ident)}" if source is not None else self.source
