"""The JSON of replies, for the OpenAPI document only: replies are not built from these; tests compare the two.

A field with its default value is left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, create_model

from layertap.models.errors import Fault
from layertap.models.labels import Outputs
from layertap.models.plan.requested import Measure
from layertap.models.registry import State
from layertap.models.spec import Color, Decode, DType, InputDType, Interpolation, MemoryFormat
from layertap.service.features import Receipt, TopEffect
from layertap.service.settings import LIMITS, Settings

Shape = list[int]
Size = int | tuple[int, int] | None

# Nested lists with one level per axis, null for NaN and infinity. Not a recursive schema, because generators of
# TypeScript turn that into an infinite type.
Numbers = float | bool | list[Any] | None


class Problem(BaseModel):
    """An error, in the form of RFC 9457; of very many ``errors`` the first, and the number of others."""

    type: str
    title: str
    status: int
    detail: str
    hint: str | None = None
    request_id: str
    errors: list[Fault] = []
    more_errors: int = 0


class SparseRow(BaseModel):
    """The values of a row that are not 0, and their indices."""

    indices: list[int]
    values: list[float | None]


class Feature(BaseModel):
    """A result: an array as nested lists, in base64 as little-endian bytes in C order, or as a list of sparse rows.

    An int8 result has a ``scale`` for each index of axis 0: value = int8 · scale.
    """

    shape: Shape
    dtype: str
    data: str | list[SparseRow] | Numbers
    scale: Numbers = None


class TopClassReply(BaseModel):
    """One of a row's best classes: ``score`` is the model's output, ``probability`` its softmax over all classes.

    If the model's outputs are probabilities or their logarithms, the class's own. ``activation`` is sigmoid where the
    model has a class with many labels. There is no ``probability`` if there is only one score.
    """

    klass: int = Field(alias="class")
    score: float
    probability: float | None = None
    activation: str | None = None
    label: str | None = None


class FeaturesReply(BaseModel):
    """Results by their keys, rows in the order of the inputs, and a receipt for each.

    ``errors``: of the inputs that were left out. ``interventions``: the layers that each one changed. ``top_classes``:
    for explanations, the best classes of each row; ``top_effects``: for sweeps, the largest effects on each input.
    ``texts``: what each input's generated tokens say.
    """

    model: str
    fingerprint: str
    space: str = ""
    rows: int
    features: dict[str, Feature]
    receipts: dict[str, Receipt]
    errors: list[Fault]
    verified: bool = False
    interventions: list[list[str]] = []
    warnings: list[str] = []
    top_classes: list[list[TopClassReply]] = []
    top_effects: list[list[TopEffect]] = []
    texts: list[str] = []


class FeatureSize(BaseModel):
    """The shape and size of a result."""

    shape: Shape
    dtype: str
    bytes: int


class DryRunReply(BaseModel):
    """The plan of a request.

    ``stops_at``: the last layer of its forwards; ``cost``: their share of a full one; ``seconds``: of all forwards.
    """

    model: str
    fingerprint: str
    space: str = ""
    rows: int
    features: dict[str, FeatureSize]
    bytes: int
    stops_at: str
    interventions: list[list[str]] = []
    rows_per_forward: int | None = None
    cost: float
    seconds: float
    warnings: list[str]
    errors: list[Fault]


class ProbeReply(BaseModel):
    """Receipts with probes, by the keys of a reply."""

    model: str
    fingerprint: str
    space: str = ""
    receipts: dict[str, Receipt]


class ModelInput(BaseModel):
    """An input of a model: ``shape`` of one row, in which one axis may have up to ``longest`` entries."""

    name: str
    shape: Shape
    dtype: InputDType
    longest: int | None = None
    batch_axis: int | None = None


class Preprocessing(BaseModel):
    """How a picture becomes a row: sizes are the short side or the square, or height and width; null: no such step.

    ``mean`` and ``std`` are for each channel, in the range of ``scale``; without one, 0 to 1.
    """

    resize: Size
    crop: Size
    mean: list[float]
    std: list[float]
    interpolation: Interpolation
    channels: Literal["gray", "bgr"] | None = None
    letterbox: Color | None = None
    background: Color | None = None
    scale: tuple[float, float] | None = None
    crop_rounding: Literal["floor"] | None = None
    decode: Decode


class LibraryPreprocessing(BaseModel):
    """The image processor of the model's own library, and a digest of its settings."""

    processor: str
    settings: str
    background: Color | None = None
    decode: Decode


class SoundPreprocessing(BaseModel):
    """The feature extractor of the model's own library for sounds, and what is done before it.

    ``rate``: samples a second; ``channels``: 1, the mean of all that are sent, or as many as must be.
    """

    processor: str
    settings: str
    rate: int
    channels: int
    sound: str


class VideoPreprocessing(BaseModel):
    """How many ``frames`` of a video are taken, and which; ``each`` of them as a picture."""

    frames: int
    sampling: str
    each: dict[str, Any]


class CountedNames(BaseModel):
    """The number of names, and the first of them."""

    count: int
    names: list[str]


class Checkpoint(BaseModel):
    """How a checkpoint was loaded: from which dictionary, without which prefix, and what did not match."""

    key: str = ""
    prefix: str = ""
    missing: CountedNames | None = None
    left_over: CountedNames | None = None
    unread: CountedNames | None = None
    adapter: str = ""


class ModelLabels(BaseModel):
    """How many classes have names, and the source of these."""

    count: int
    origin: str = Field(alias="from")


class LabelsReply(BaseModel):
    """The names of a model's classes, from class 0 on; null if it has none."""

    model: str
    labels: list[str] | None


class EmbeddingChoice(BaseModel):
    """How the embedding's tensor becomes a vector, and why it is the model's embedding."""

    pool: str
    normalize: bool
    reason: str


class TextInputs(BaseModel):
    """The model's text input; ``vocabulary`` is the number of ids, ``mask`` the name of an input.

    ``generates``: requests may have ``generate``. ``cuts``: a text of more than ``max_tokens`` is cut, not refused.
    ``prompts``: those of its folder, by name.
    """

    takes: list[Literal["text", "text_pair", "messages", "tokens"]]
    max_tokens: int
    vocabulary: int
    mask: str | None
    generates: bool = False
    cuts: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""


class Replacement(BaseModel):
    """A model's next version that is loading, or could not be loaded."""

    state: State
    reason: str = ""


class Model(BaseModel):
    """A configured model; some fields are only present if ``state`` is ``ready``.

    ``cast``: names of tensors that have been cast to ``dtype``, by the dtype that they were built in.
    """

    name: str
    state: State
    source: str
    dtype: DType
    tf32: bool = False
    memory_format: MemoryFormat = "contiguous"
    reason: str = ""
    device: str
    inputs: list[ModelInput] = []
    preprocess: Preprocessing | LibraryPreprocessing | SoundPreprocessing | VideoPreprocessing | None = None
    cast: dict[str, str] = {}
    weights: str = ""
    weights_digest: str = ""
    checkpoint: Checkpoint | None = None
    embedding: str | None = None
    embedding_choice: EmbeddingChoice | None = None
    labels: ModelLabels | None = None
    outputs: Outputs = "logits"
    layers: int = 0
    hooks: int
    deterministic: bool = True
    memory_bytes: int = 0
    total_memory_bytes: int = 0
    replacement: Replacement | None = None
    text: TextInputs | None = None


_LIMITS: dict[str, Any] = {name: (Settings.model_fields[name].annotation, ...) for name in LIMITS}
Limits = create_model("Limits", __doc__="Settings that requests are to keep within.", **_LIMITS)


class ModelsReply(BaseModel):
    """All configured models, the name of the default one, and aliases."""

    default: str
    aliases: dict[str, str]
    models: list[Model]
    limits: Limits


class ComparisonReply(BaseModel):
    """Tables by measure: a row for each of ``layers``, a column for each of ``other_layers``; null where it has none.

    ``gram`` has a matrix of the inputs for each of both, ``hsic`` a row and a column for each of both.
    ``fingerprints``: of the features of ``layers`` and of ``other_layers``.
    """

    model: str
    other_model: str
    layers: list[str]
    other_layers: list[str]
    rows: int
    fingerprint: str
    fingerprints: list[str]
    measures: dict[Measure, Numbers]
    warnings: list[str] = []


class ReloadReply(BaseModel):
    """The changes of a reloaded configuration: names of models; for changed ones, the fields.

    ``aliases``: each changed one with its new model, or null; ``default`` is null if unchanged.
    """

    added: list[str]
    removed: list[str]
    changed: dict[str, list[str]]
    aliases: dict[str, str | None]
    default: str | None


class Tensor(BaseModel):
    """A tensor of one row, by its path; ``layout`` names its axes, ``heads``: that its channels hold side by side."""

    path: str
    shape: Shape
    dtype: str
    layout: str | None
    heads: int | None = None


class CallTensor(Tensor):
    """A tensor of one call of a layer; ``order``: of two hooks the one with the smaller number runs first."""

    call: int
    order: float


class AttentionTensor(CallTensor):
    """Attention weights; ``how``: from the model's own softmax, or recomputed beside a fused kernel."""

    how: str


class LayerFunction(BaseModel):
    """A function that a layer's own forward calls; ``name`` is the part of a selector, ``order``: when it returns."""

    call: int
    name: str
    order: float
    outputs: list[Tensor]
    inputs: list[Tensor]


class Layer(BaseModel):
    """A layer; ``cost`` is the share of a forward up to here, ``share`` its own; null if it never runs."""

    name: str
    type: str
    leaf: bool
    calls: int
    outputs: list[CallTensor]
    inputs: list[CallTensor]
    attention: list[AttentionTensor]
    attention_sink: list[AttentionTensor]
    parameters: int
    layout: str | None
    cost: float | None
    share: float | None
    hazards: list[str]
    functions: list[LayerFunction] = []


class LayersReply(BaseModel):
    """Layers in the order of the forward; ``seconds``: of one forward; ``rowwise``: rows do not affect each other."""

    model: str
    layers: list[Layer]
    seconds: float
    rowwise: bool
    embedding: str | None


class HealthReply(BaseModel):
    """The server is alive, or ready; ``failed``: kinds of failures of models that it is ready without."""

    status: Literal["alive", "ready"]
    failed: list[str] = []
