"""A model in memory: its module on its device, what it takes, what identifies it, and how rows run through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from models import fingerprint, hooks, sources, weights
from models.catalog import Catalog, Layer
from models.dryrun import survey
from models.dtypes import DTYPES
from models.errors import InputError, LoadError, TooLargeError, quoted
from models.extractor import FeatureExtractor
from models.plan import Capture, Plan
from models.pooling import Reduced
from models.spec import InputSpec, ModelSpec, PreprocessSpec

Rows = Mapping[str, Tensor]
Shapes = tuple[tuple[int, ...], ...]
MAX_CATALOGS = 8  # one for each shape of input that was asked for lately


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Its module belongs to one thread: everything that runs it or surveys it happens there.

    ``digest`` is that of the weights as loaded; ``identity`` the model's part of every fingerprint; ``own_hooks``
    counts hooks that the module brought along.
    """

    spec: ModelSpec
    module: nn.Module
    device: torch.device
    inputs: tuple[InputSpec, ...]
    preprocess: PreprocessSpec | None
    prefix_tokens: int
    weights: str
    digest: str
    identity: str
    extractor: FeatureExtractor
    own_hooks: int
    catalogs: OrderedDict[Shapes, Catalog] = field(default_factory=OrderedDict)

    @property
    def shapes(self) -> Shapes:
        """The configured shape of one row, input by input."""
        return tuple(spec.shape for spec in self.inputs)

    @property
    def hooks(self) -> int:
        """Hooks of ours on the module now: 0 when idle."""
        return hooks.count(self.module) - self.own_hooks

    @property
    def catalog(self) -> Catalog:
        """The catalogue for the configured shape, made at loading."""
        return self.catalogs[self.shapes]

    @property
    def embedding(self) -> str:
        """The selector of the default embedding: configured, else what goes into the last fully connected layer."""
        if self.spec.embedding is not None:
            return self.spec.embedding
        last = max(self.catalog.layers.values(), key=_end_of_linear)
        return f"{last.name}:input" if _end_of_linear(last) > 0 else "."

    def catalog_for(self, shapes: Shapes) -> Catalog:
        """The catalogue for a shape of input, surveyed when first asked for; InputError where it does not fit."""
        if shapes not in self.catalogs:
            inputs = [replace(spec, shape=shape) for spec, shape in zip(self.inputs, shapes, strict=True)]
            catalog = survey(self.module, inputs, self.forward, self.device, self.prefix_tokens, self.dtype)
            while len(self.catalogs) >= MAX_CATALOGS:
                oldest = next(known for known in self.catalogs if known != self.shapes)
                del self.catalogs[oldest]
            self.catalogs[shapes] = catalog
        if shapes != self.shapes:
            self.catalogs.move_to_end(shapes)
        return self.catalogs[shapes]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the floating parameters and inputs have."""
        return DTYPES[self.spec.dtype]

    def forward(self, rows: Rows) -> object:
        """One forward of a batch; a single input goes by position, several by name."""
        if len(rows) == 1:
            return self.module(*rows.values())
        return self.module(**rows)

    def extract(self, rows: Rows, plan: Plan, catalog: Catalog, max_rows: int) -> dict[Capture, Reduced]:
        """The plan's captures for a batch of rows, on the device.

        Rows beyond ``max_rows`` run in further forwards; a model whose rows affect each other runs them one at a time.
        """
        total = len(next(iter(rows.values())))
        size = max_rows if catalog.rowwise else 1
        if total > size and not plan.splits:
            raise InputError(
                f"a layer asked for mixes its rows, so they must share one forward, which holds {size} here",
                hint=f"send at most {size} inputs with it",
            )
        parts = [self._run({k: v[at : at + size] for k, v in rows.items()}, plan) for at in range(0, total, size)]
        return parts[0] if len(parts) == 1 else {capture: _joined(capture, parts) for capture in plan.captures}

    def _run(self, rows: Rows, plan: Plan) -> dict[Capture, Reduced]:
        batch = {name: self._placed(value) for name, value in rows.items()}
        try:
            return self.extractor(lambda: self.forward(batch), plan.captures, len(next(iter(batch.values()))))
        except torch.OutOfMemoryError as error:
            raise TooLargeError("the device has no memory for this batch", hint="send fewer inputs at once") from error
        except (IndexError, ValueError) as error:  # a token beyond the vocabulary, for one
            raise InputError(f"the model does not take these values ({type(error).__name__})") from error

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype, copy=True)


def load(spec: ModelSpec) -> LoadedModel:
    """Build a model, place it on its device and survey it; LoadError where that can't be done."""
    device = _device(spec.device)
    built = sources.build(spec)
    digest = weights.digest(built.module)
    structure = fingerprint.architecture(built.module, built.architecture)
    # Not ``to(dtype)``, which makes complex buffers real.
    module = CASTS[spec.dtype](built.module.to(device))
    identity = fingerprint.of_model(digest, structure, spec.dtype, built.preprocess, built.inputs)
    model = LoadedModel(
        spec=spec,
        module=module,
        device=device,
        inputs=built.inputs,
        preprocess=built.preprocess,
        prefix_tokens=built.prefix_tokens,
        weights=built.weights,
        digest=digest,
        identity=identity,
        extractor=FeatureExtractor(module),
        own_hooks=hooks.count(module),
    )
    try:
        model.catalog_for(model.shapes)
    except InputError as error:
        raise LoadError(error.detail, hint="check 'inputs' and 'preprocess' of this model's configuration") from error
    return model


def _device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise LoadError(f"{quoted(name)} is no device", hint="use auto, cpu, cuda or cuda:1")
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise LoadError(f"there is no device {quoted(name)} on this machine", hint="use auto or cpu")
    # Convolutions in TF32, cuDNN's default, keep 10 bits of mantissa: not what an offline forward in float32 gives.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", int(index or 0))


def _joined(capture: Capture, parts: Sequence[dict[Capture, Reduced]]) -> Reduced:
    if capture.leaf.row_axis is None:
        return parts[0][capture]
    axis = 0 if capture.reduction.pool != "none" else capture.leaf.row_axis
    values = torch.cat([part[capture].values for part in parts], dim=axis)
    scales = [scale for part in parts if (scale := part[capture].scale) is not None]
    return Reduced(values, torch.cat(scales) if scales and axis == 0 else scales[0] if scales else None)


def _end_of_linear(layer: Layer) -> int:
    return layer.calls[-1].output.order if layer.calls and layer.type == "Linear" else 0


CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
}
