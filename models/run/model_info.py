"""What a server has to know about a model, wherever it runs: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from layertap.models.catalog.catalog import Catalog
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.labels import Labels
from layertap.models.plan.embedding import JOINT, ModelEmbedding, choose_embedding
from layertap.models.plan.projections import Projections
from layertap.models.run.compiled_plan import CompiledPlan, PlanBenchmark
from layertap.models.run.model_catalogs import CatalogCache
from layertap.models.sources.state_dict import LoadReport
from layertap.models.spec import InputSpec, ModelSpec, Shapes

NOT_DETERMINISTIC = "this model is not deterministic: it gives the same input another answer each time"


@dataclass(frozen=True)
class ModelInfo:
    """What a model takes, what identifies it, and what its forwards show.

    ``digest``: of the weights as loaded; ``identity``: the model's part of every fingerprint; ``threads``: the number
    that surveys use on a CPU. ``model_embedding``: the tensor of a request without layers; None if there is none.
    ``compiled``: one entry for each warm plan, None for plans that run with hooks; ``benchmarks``: the measurements
    for each plan, None without graphs. ``report``: what was loaded from a checkpoint, None if there is none.
    ``labels``: a name for each class of the model's scores, None if there are no names. ``memory_bytes``: the size of
    weights and buffers; ``process_bytes``: private memory of the model's own process, 0 if it has none.
    ``projections``: the configured ones by name. ``casts``: the names of tensors that were cast to the model's dtype,
    by the dtype that they had; ``load_warnings``: what every answer has to say since the model was loaded.
    """

    spec: ModelSpec
    device: torch.device
    model_inputs: ModelInputs
    prefix_tokens: int
    weights: str
    digest: str
    identity: str
    threads: int
    catalogs: CatalogCache
    model_embedding: ModelEmbedding | None
    compiled: tuple[CompiledPlan | None, ...] = ()
    benchmarks: tuple[PlanBenchmark | None, ...] = ()
    report: LoadReport | None = None
    labels: Labels | None = None
    memory_bytes: int = 0
    process_bytes: int = 0
    projections: Projections = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    load_warnings: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that make up one row."""
        return self.model_inputs.specs

    @property
    def shapes(self) -> Shapes:
        """The configured shape of one row, input by input."""
        return self.model_inputs.shapes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the floating parameters and inputs have."""
        return self.model_inputs.dtype

    @property
    def preprocess(self) -> Preprocessing | None:
        """How a picture becomes a row; None if the model takes no pictures."""
        return self.model_inputs.preprocess

    @property
    def text(self) -> TextSpec | None:
        """How a text becomes a row; None if the model takes no texts."""
        return self.model_inputs.text

    @property
    def catalog(self) -> Catalog:
        """The catalog for the configured shape, made at loading."""
        return self.catalogs.configured

    def get_catalog(self, tower: ModelInputs) -> Catalog:
        """The catalog for the configured shape of one of two towers, or of all inputs."""
        return self.catalogs.towers.get(tower.shapes, self.catalog)

    def for_tower(self, tower: ModelInputs) -> ModelInfo:
        """The ModelInfo restricted to one of two towers, or to both together; for other models, the model itself."""
        if tower is self.model_inputs:
            return self
        known = {each.name: getattr(self, each.name) for each in fields(ModelInfo)}
        known |= {"model_inputs": tower, "catalogs": CatalogCache(self.get_catalog(tower), tower.shapes)}
        if tower.tower is None:
            known["model_embedding"] = choose_embedding(JOINT, False, self.catalog)
        return ModelInfo(**known)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that apply to every answer of this model."""
        of_checkpoint = self.report.warnings if self.report is not None else ()
        of_catalog = () if self.catalog.traits.deterministic else (NOT_DETERMINISTIC,)
        return (*of_checkpoint, *self.load_warnings, *of_catalog)

    @property
    def embedding(self) -> str | None:
        """The text of the embedding's selector."""
        return self.model_embedding.selector.text if self.model_embedding is not None else None

    @property
    def device_name(self) -> str:
        """The device's name for people."""
        return str(self.device)

    @property
    def hooks(self) -> int:
        """The number of our hooks on the model now, wherever it runs: 0 when idle."""
        return 0
