"""Catalogs and other findings from forwards of noise, measured when first needed and cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.sketch import NO_SKETCH
from layertap.models.catalog.survey import name_input_errors, resize_catalog, survey
from layertap.models.catalog.trials import is_same_again, run_alone, try_padding
from layertap.models.devices import memory
from layertap.models.devices.devices import use_threads
from layertap.models.errors import SelectorError, out_of_memory_error
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.noise import copy_rows, make_noise, make_noise_row
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.plan import ResolvedObjective, Tap, find_tensor
from layertap.models.points import Point
from layertap.models.run.costs import add_reading, make_costs, measure_forward, time_call
from layertap.models.run.extractor import FeatureExtractor
from layertap.models.run.map_layers import find_last_sensitive, find_map_layers
from layertap.models.run.replica import KeptForward, may_stop
from layertap.models.run.resumption import Resumption, not_resumable_error
from layertap.models.run.resumption_proof import verify_resumable
from layertap.models.run.row_check import CrossingRows
from layertap.models.spec import InputSpec, Shapes

MAX_CATALOGS = 16  # one for each recent shape of input; texts of 8 to 131,072 tokens have 15 lengths
MAX_RESUMPTIONS = 16  # one for each recent layer to resume from, and shape of input
MAX_GRAD_CAM_LAYERS = 32  # one for each recent objective of Grad-CAM, classes aside
QUICK_S = 0.5  # CPU-seconds of a forward for which one thread is enough: further threads would only spin


def survey_configured(
    forward: KeptForward,
    inputs: ModelInputs,
    device: torch.device,
    prefix_tokens: int,
    threads: int,
    history: Path | None,
    tolerance: float,
) -> Catalog:
    """The catalog of a module for rows of the configured shape, which it has not run yet; InputError.

    Measured times of forwards are kept in the file ``history``. ``tolerance``: how far rounding may move a value,
    as a share of the tensor's largest. OutOfMemoryError.
    """
    with _running(forward, threads):
        catalog = _survey(forward, inputs, device, prefix_tokens, tolerance)
        row = make_noise_row(inputs.specs, device, inputs.dtype)
        row_bytes = _measure_row_bytes(forward, row, device)
        again = history is not None and history.exists()
        reading = measure_forward(
            forward, row, device, crosses_rows=catalog.crosses_rows, max_threads=threads, again=again
        )
    costs = make_costs(add_reading(history, reading) if history else [reading], row_bytes)
    # The minimum, since noise only adds; and a survey of a quick model uses a single thread.
    seconds = min(catalog.seconds, costs.estimate_seconds(1) / costs.speedup)
    return replace(catalog, seconds=seconds, costs=costs)


def _survey(
    forward: KeptForward, inputs: ModelInputs, device: torch.device, prefix_tokens: int, tolerance: float
) -> Catalog:
    """The catalog of the configured shape."""
    row = make_noise_row(inputs.specs, device, inputs.dtype)
    with torch.no_grad():
        with name_input_errors(inputs.specs):
            start = time.thread_time()
            output = run_alone(forward, row)
            seconds = time.thread_time() - start
            forward.settle()
        with use_threads(1 if seconds < QUICK_S else torch.get_num_threads()):
            catalog = survey(
                forward.module, inputs.specs, forward, device, prefix_tokens, inputs.dtype, tolerance=tolerance
            )
            padding = try_padding(forward, inputs.text, device, tolerance) if inputs.text else None
        stops = may_stop(forward, row)
        is_same = is_same_again(forward, row, output)
    forward.restore(thorough=True)
    state = tuple(sorted(forward.found))
    traits = replace(catalog.traits, state=state, stops=stops, deterministic=is_same)
    if padding is not None and is_same:
        # A model that replaces submodules according to the text's length would react to padding, too (BigBird).
        if any(attribute in forward.module.get_submodule(name)._modules for name, attribute in state):
            padding = False, "refused"
        traits = replace(traits, pads=padding[0], left_padding=padding[1])
    # Of an answer that varies a neighbour's effect can't be told: each row runs alone.
    return replace(catalog, crosses_rows=catalog.crosses_rows or not is_same, traits=traits)


@contextmanager
def _running(forward: KeptForward, threads: int) -> Iterator[None]:
    """Run the module inside; what that changes of it is put back.

    OutOfMemoryError if a device has no memory for a forward, after everything that it held is freed.
    """
    try:
        with use_threads(threads), forward.kept():  # a new thread inherits the number set last by any thread
            yield
        return
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
    raise out_of_memory_error(1)


class CatalogCache:
    """The catalogs of a model by the shape of a row, and other recent findings about it.

    ``resumptions``: how forwards resume from a point, by point and shape; ``grad_cam_layers``: the layer that Grad-CAM
    uses for an objective. ``configured`` is the catalog of the configured ``shapes``, ``towers`` has those of
    each of two towers; they are never dropped. ``crossing`` is set if rows were found to affect each other while the
    model served. Any thread may call the methods.
    """

    def __init__(
        self,
        configured: Catalog,
        shapes: Shapes,
        towers: Mapping[Shapes, Catalog] | None = None,
        crossing: CrossingRows | None = None,
    ) -> None:
        self.crossing = crossing
        self.configured = configured
        self.towers = dict(towers or {})
        self._shapes = shapes
        self._catalogs = LRUCache[Shapes, Catalog](MAX_CATALOGS - 1)
        self.resumptions = LRUCache[tuple[Point, Shapes], Resumption](MAX_RESUMPTIONS)
        self.grad_cam_layers = LRUCache[ResolvedObjective, Tap](MAX_GRAD_CAM_LAYERS)

    def __reduce__(self) -> tuple[Callable[..., CatalogCache], tuple[object, ...]]:
        """Pickle only the configured catalogs."""
        return CatalogCache, (self.configured, self._shapes, self.towers, self.crossing)

    def note_crossing(self, crossing: CrossingRows) -> None:
        """Rows turned out to affect each other: from now on every catalog says so."""
        self.crossing = crossing
        for shapes, catalog in ((self._shapes, self.configured), *self.towers.items()):
            self.put_catalog(shapes, catalog)
        self._catalogs = LRUCache[Shapes, Catalog](MAX_CATALOGS - 1)
        self.resumptions = LRUCache[tuple[Point, Shapes], Resumption](MAX_RESUMPTIONS)

    def get_catalog(self, shapes: Shapes, *, functions: bool = False) -> Catalog | None:
        """The cached catalog of a shape; None if there is none, or none with ``functions`` if these are wanted."""
        known = self.configured if shapes == self._shapes else self.towers.get(shapes) or self._catalogs.get(shapes)
        return known if known is not None and (known.has_functions or not functions) else None

    def put_catalog(self, shapes: Shapes, catalog: Catalog) -> None:
        """Keep the catalog of a shape, replacing an earlier one, which may have fewer details."""
        catalog = replace(catalog, crosses_rows=True) if self.crossing is not None else catalog
        if shapes == self._shapes:
            self.configured = catalog
        elif shapes in self.towers:
            self.towers = self.towers | {shapes: catalog}
        else:
            self._catalogs.put(shapes, catalog)


class ModelCatalogs(CatalogCache):
    """The cached findings about a model in memory; missing ones are measured by running it.

    Any thread may read the cache. The other methods run the module, with ``threads`` threads on a CPU: call them only
    in the module's own thread.
    """

    def __init__(
        self,
        forward: KeptForward,
        inputs: ModelInputs,
        device: torch.device,
        prefix_tokens: int,
        threads: int,
        configured: Catalog,
        crossing: CrossingRows | None = None,
    ) -> None:
        """``configured`` is what ``survey_configured`` returned for the module."""
        super().__init__(configured, inputs.shapes, crossing=crossing)
        self._module = forward.module
        self._forward = forward
        self._inputs = inputs
        self._device = device
        self._prefix_tokens = prefix_tokens
        self._threads = threads
        self._not_resumable = LRUCache[tuple[Point, Shapes], bool](MAX_RESUMPTIONS)

    def survey(self, shapes: Shapes, *, functions: bool = False) -> Catalog:
        """The catalog of a shape, surveyed if not cached; InputError if the model does not take the shape.

        With ``functions`` it includes what functions return. OutOfMemoryError.
        """
        catalog = self.get_catalog(shapes)
        if catalog is None:
            specs = self._inputs.with_shapes(shapes)
            with _running(self._forward, self._threads):
                catalog = self._resize(specs)
                if catalog is None:
                    catalog = self._survey(specs)
                    row_bytes = _measure_row_bytes(self._forward, self._make_row(specs), self._device)
                    per_row = self.configured.costs.per_row * catalog.seconds / self.configured.seconds
                    costs = replace(self.configured.costs, per_row=per_row, row_bytes=row_bytes)
                    catalog = replace(catalog, costs=costs, tower=self._inputs.for_shapes(shapes).tower)
            self.put_catalog(shapes, catalog)
        if functions and not catalog.has_functions:
            with _running(self._forward, self._threads):
                other = self._survey(self._inputs.with_shapes(shapes), functions=True)
            catalog = replace(other, seconds=catalog.seconds, costs=catalog.costs, tower=catalog.tower)
            self.put_catalog(shapes, catalog)
        return catalog

    def survey_towers(self) -> dict[Shapes, Catalog]:
        """The catalogs of each of two towers for its configured shape; InputError if one does not run alone."""
        return {tower.shapes: self.survey(tower.shapes) for tower in self._inputs.towers if tower.tower}

    def verify_resumption(self, start: Tap, shapes: Shapes) -> Resumption:
        """How forwards of a shape resume from a tensor; tried if not cached.

        SelectorError if the model can't resume there, OutOfMemoryError.
        """
        key = start.point, shapes
        if self._not_resumable.get(key):
            raise not_resumable_error(start.point)
        resumption = self.resumptions.get(key)
        if resumption is None:
            catalog, specs = self.survey(shapes, functions=bool(start.point.function)), self._inputs.with_shapes(shapes)
            rows, dtype = make_noise(specs, self._device, self._inputs.dtype), self._inputs.dtype
            try:
                with _running(self._forward, self._threads):
                    resumption = verify_resumable(self._module, start, catalog, specs, self._forward, rows, dtype)
            except SelectorError:  # cached too, or each request for it would try again
                self._not_resumable.put(key, True)
                raise
            self.resumptions.put(key, resumption)
        return resumption

    def find_grad_cam_layer(self, objective: ResolvedObjective) -> Tap:
        """The last layer with feature maps that an objective depends on, tried if not cached; OutOfMemoryError.

        If the objective depends on none of the last few, the very last one: its map is zero. SelectorError if there
        are no feature maps.
        """
        layer = self.grad_cam_layers.get(objective)
        if layer is None:
            if objective.point.function:
                self.survey(self._inputs.shapes, functions=True)
            inputs, catalog = self._inputs.pictures, self.towers.get(self._inputs.pictures.shapes, self.configured)
            if find_tensor(objective.point, catalog) is None:
                inputs, catalog = self._inputs, self.configured
            layers = find_map_layers(catalog, objective.point)
            row = self._make_row(inputs.specs)
            with _running(self._forward, self._threads):
                layer = find_last_sensitive(
                    FeatureExtractor(self._module),
                    lambda: self._forward(copy_rows(row)),
                    layers,
                    objective,
                )
            layer = layer or layers[0]
            self.grad_cam_layers.put(objective, layer)
        return layer

    def _survey(self, specs: Sequence[InputSpec], *, functions: bool = False) -> Catalog:
        tower, dtype = self._inputs.for_shapes(tuple(spec.shape for spec in specs)), self._inputs.dtype
        prefix = 0 if tower.tower == "texts" else self._prefix_tokens
        catalog = survey(self._module, specs, self._forward, self._device, prefix, dtype, functions=functions)
        traits = self.configured.traits
        crosses_rows = catalog.crosses_rows or not traits.deterministic or self.crossing is not None
        return replace(catalog, crosses_rows=crosses_rows, traits=traits)

    def _resize(self, specs: Sequence[InputSpec]) -> Catalog | None:
        """The catalog of another shape by its sizes and time; None if that is not enough."""
        if self._inputs.mask is not None or any(spec.longest for spec in specs):
            return None  # for texts everything may depend on the length, and there are few lengths
        recorder = CallRecorder(self._module, look=lambda tensor: NO_SKETCH)
        watch = partial(recorder.watch, self._forward)
        costs = self.configured.costs
        threads = self._threads if costs.speedup > 1 else 1  # as many as a request's forward uses
        with torch.no_grad(), use_threads(threads), name_input_errors(specs):
            row = make_noise(specs, self._device, self._inputs.dtype, rows=1)
            row_bytes, seconds = time_call(
                lambda: memory.measure_peak_bytes(watch, row, self._module, self._device), self._device
            )
            if seconds < QUICK_S:  # what watches it takes a part of that
                _, seconds = time_call(lambda: self._forward(copy_rows(row)), self._device)
        catalog = resize_catalog(self.configured, self._module, recorder, self._prefix_tokens)
        if catalog is None:
            return None
        on_one_thread = seconds * (costs.speedup if threads > 1 else 1.0)
        per_row = max(on_one_thread - costs.base, costs.per_row * seconds / self.configured.seconds)
        return replace(catalog, seconds=seconds, costs=replace(costs, per_row=per_row, row_bytes=row_bytes))

    def _make_row(self, specs: Sequence[InputSpec]) -> dict[str, Tensor]:
        return make_noise_row(specs, self._device, self._inputs.dtype)


def _measure_row_bytes(forward: KeptForward, row: memory.Inputs, device: torch.device) -> int:
    with torch.no_grad(), use_threads(1):
        return memory.measure_peak_bytes(forward, row, forward.module, device)
