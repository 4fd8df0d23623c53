"""What a server has to know about a model, wherever it runs: plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from layertap.models.catalog.catalog import Catalog
from layertap.models.inputs.generation import FEW_STEPS
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.inputs.sound import Media
from layertap.models.labels import Labels
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.embedding import JOINT, ModelEmbedding, choose_embedding
from layertap.models.plan.plan import ResolvedObjective, Tap
from layertap.models.plan.projections import Projections
from layertap.models.points import Point
from layertap.models.run.compiled_plan import CompiledPlan
from layertap.models.run.resumption import Resumption
from layertap.models.run.row_check import CrossingRows
from layertap.models.sources.state_dict import LoadReport
from layertap.models.spec import InputSpec, ModelSpec, Shapes

NOT_DETERMINISTIC = "this model is not deterministic: it gives the same input another answer each time"
MAX_CATALOGS = 16  # one for each recent shape of input; texts of 8 to 131,072 tokens have 15 lengths
MAX_GENERATIONS = 6  # the same for texts that are continued, whose catalogs have the calls of every step
MAX_FEW_STEPS = 48  # those of a few steps, of which the others are made
MAX_RESUMPTIONS = 16  # one for each recent layer to resume from, and shape of input
MAX_GRAD_CAM_LAYERS = 32  # one for each recent objective of Grad-CAM, classes aside


class CatalogCache:
    """The catalogs of a model by the shape of a row, and other recent findings about it.

    The configured catalogs are never dropped. Any thread may call the methods.
    """

    def __init__(
        self,
        configured: Catalog,
        shapes: Shapes,
        towers: Mapping[Shapes, Catalog] | None = None,
        crossing: CrossingRows | None = None,
    ) -> None:
        self.configured = configured  # of the configured ``shapes``
        self.towers = dict(towers or {})  # of each of two towers
        self.crossing = crossing  # set if rows were found to affect each other while the model served
        self._shapes = shapes
        self._catalogs = LRUCache[Shapes, Catalog](MAX_CATALOGS - 1)
        self._generations = LRUCache[Shapes, Catalog](MAX_GENERATIONS)
        self._few_steps = LRUCache[Shapes, Catalog](MAX_FEW_STEPS)
        self.resumptions = LRUCache[tuple[Point, Shapes], Resumption](MAX_RESUMPTIONS)
        self.not_resumable = LRUCache[tuple[Point, Shapes], bool](MAX_RESUMPTIONS)
        self.grad_cam_layers = LRUCache[ResolvedObjective, Tap](MAX_GRAD_CAM_LAYERS)  # the layer for an objective

    def __reduce__(self) -> tuple[Callable[..., CatalogCache], tuple[object, ...]]:
        """Pickle only the configured catalogs."""
        return CatalogCache, (self.configured, self._shapes, self.towers, self.crossing)

    def note_crossing(self, crossing: CrossingRows) -> None:
        """Rows turned out to affect each other: from now on every catalog says so."""
        self.crossing = crossing
        for shapes, catalog in ((self._shapes, self.configured), *self.towers.items()):
            self.put_catalog(shapes, catalog)
        self._catalogs.clear()
        self._generations.clear()
        self._few_steps.clear()
        self.resumptions.clear()

    def get_catalog(self, shapes: Shapes, *, functions: bool = False) -> Catalog | None:
        """The cached catalog of a shape; None if there is none, or none with ``functions`` if these are wanted."""
        known = self.configured if shapes == self._shapes else self.towers.get(shapes)
        known = known or self._choose_cache(shapes).get(shapes)
        return known if known is not None and (known.has_functions or not functions) else None

    def list_other_catalogs(self) -> list[tuple[Shapes, Catalog]]:
        """The cached catalogs of other shapes than the configured ones, without those of generations."""
        return self._catalogs.list_items()

    def put_catalog(self, shapes: Shapes, catalog: Catalog) -> None:
        """Keep the catalog of a shape, replacing an earlier one, which may have fewer details."""
        catalog = replace(catalog, crosses_rows=True) if self.crossing is not None else catalog
        if shapes == self._shapes:
            self.configured = catalog
        elif shapes in self.towers:
            self.towers = self.towers | {shapes: catalog}
        else:
            self._choose_cache(shapes).put(shapes, catalog)

    def _choose_cache(self, shapes: Shapes) -> LRUCache[Shapes, Catalog]:
        if len(shapes) <= len(self._shapes):  # of one of two towers there are fewer
            return self._catalogs
        return self._few_steps if shapes[-1][1] == FEW_STEPS else self._generations


@dataclass(frozen=True)
class ModelInfo:
    """What a model takes, what identifies it, and what its forwards show."""

    spec: ModelSpec
    device: torch.device
    model_inputs: ModelInputs
    prefix_tokens: int
    weights: str
    digest: str  # of the weights as loaded
    identity: str  # the model's part of every fingerprint
    space: str  # the model's part of every space
    threads: int  # that surveys use on a CPU
    catalogs: CatalogCache
    model_embedding: ModelEmbedding | None = None  # the tensor of a request without layers; None if there is none
    compiled: tuple[CompiledPlan | None, ...] = ()  # one for each warm plan, None for those that run with hooks
    report: LoadReport | None = None  # what was loaded from a checkpoint, None if there is none
    labels: Labels | None = None  # a name for each class of the model's scores, None if there are no names
    memory_bytes: int = 0  # of weights and buffers
    process_bytes: int = 0  # private memory of the model's own process, 0 if it has none
    projections: Projections = field(default_factory=dict)  # the configured ones by name
    casts: Mapping[str, str] = field(default_factory=dict)  # names of tensors cast to its dtype, by the dtype they had
    load_warnings: tuple[str, ...] = ()  # for every answer

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
    def preprocess(self) -> Media | None:
        """How a picture or a sound becomes a row; None if the model takes neither."""
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
        restricted = self.describe(model_inputs=tower, catalogs=CatalogCache(self.get_catalog(tower), tower.shapes))
        joint = choose_embedding(JOINT, False, self.catalog) if tower.tower is None else self.model_embedding
        return replace(restricted, model_embedding=joint)

    def describe(self, **changes: Any) -> ModelInfo:
        """What a server has to know, without what runs the model; with ``changes`` to its fields."""
        return ModelInfo(**{each.name: getattr(self, each.name) for each in fields(ModelInfo)} | changes)

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
