"""Catalogs and other findings from forwards of noise, measured when first needed and cached."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from layertap.models.catalog.call_recorder import NO_SKETCH, CallRecorder
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import name_input_errors, resize_catalog, survey
from layertap.models.catalog.trials import is_same_again, run_alone, try_padding
from layertap.models.devices import memory
from layertap.models.devices.devices import TOLERANCE, use_threads
from layertap.models.errors import SelectorError, out_of_memory_error
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.noise import copy_rows, make_noise, make_noise_row
from layertap.models.plan.plan import Tap
from layertap.models.run.costs import measure_costs, time_call
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica, may_stop
from layertap.models.run.resumption import Resumption, not_resumable_error, verify_resumable
from layertap.models.spec import InputSpec, Shapes

QUICK_S = 0.5  # CPU-seconds of a forward for which one thread is enough: further threads would only spin


def survey_configured(
    replica: Replica, inputs: ModelInputs, device: torch.device, prefix_tokens: int, threads: int, tolerance: float
) -> Catalog:
    """The catalog of a module for rows of the configured shape, which it has not run yet; InputError.

    ``tolerance``: how far rounding may move a value, as a share of the tensor's largest. OutOfMemoryError.
    """
    with run_noise(replica, threads):
        catalog = _survey_configured(replica, inputs, device, prefix_tokens, tolerance)
        row = make_noise_row(inputs.specs, device, inputs.dtype)
        row_bytes, crosses_rows = _measure_row_bytes(replica, row, device), catalog.crosses_rows
        costs = measure_costs(replica, row, device, row_bytes, crosses_rows=crosses_rows, max_threads=threads)
    # The minimum, since noise only adds; and a survey of a quick model uses a single thread.
    seconds = min(catalog.seconds, costs.estimate_seconds(1) / costs.speedup)
    return replace(catalog, seconds=seconds, costs=costs)


def _survey_configured(
    replica: Replica, inputs: ModelInputs, device: torch.device, prefix_tokens: int, tolerance: float
) -> Catalog:
    row = make_noise_row(inputs.specs, device, inputs.dtype)
    with torch.no_grad():
        with name_input_errors(inputs.specs):
            start = time.thread_time()
            output = run_alone(replica, row)
            seconds = time.thread_time() - start
            replica.settle()
        with use_threads(1 if seconds < QUICK_S else torch.get_num_threads()):
            catalog = survey(
                replica.module, inputs.specs, replica, device, prefix_tokens, inputs.dtype, tolerance=tolerance
            )
            padding = try_padding(replica, inputs.text, device, tolerance) if inputs.text else None
        stops = may_stop(replica, row)
        is_same = is_same_again(replica, row, output)
    replica.restore(thorough=True)
    state = tuple(sorted(replica.found))
    traits = replace(catalog.traits, state=state, stops=stops, deterministic=is_same)
    if padding is not None and is_same:
        # A model that replaces submodules according to the text's length would react to padding, too (BigBird).
        if any(attribute in replica.module.get_submodule(name)._modules for name, attribute in state):
            padding = False, "refused"
        traits = replace(traits, pads=padding[0], left_padding=padding[1])
    # Of an answer that varies a neighbour's effect can't be told: each row runs alone.
    return replace(catalog, crosses_rows=catalog.crosses_rows or not is_same, traits=traits)


@contextmanager
def run_noise(replica: Replica, threads: int) -> Iterator[None]:
    """Forwards of noise run inside; what they change of the module is put back.

    OutOfMemoryError if a device has no memory for a forward, after everything that it held is freed.
    """
    try:
        with use_threads(threads), replica.kept():  # a new thread inherits the number set last by any thread
            yield
        return
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
    raise out_of_memory_error(1)


def survey_shape(model: LoadedModel, shapes: Shapes, *, functions: bool = False) -> Catalog:
    """The catalog of a shape, surveyed if not cached; InputError if the model does not take the shape.

    With ``functions`` it includes what functions return. OutOfMemoryError.
    """
    catalog = model.catalogs.get_catalog(shapes)
    if catalog is None:
        specs = model.model_inputs.with_shapes(shapes)
        with run_noise(model.replica, model.threads):
            catalog = _resize(model, specs)
            if catalog is None:
                catalog = _survey(model, specs)
                # Memory is measured; time is scaled from that of the configured shape.
                row = make_noise_row(specs, model.device, model.dtype)
                row_bytes = _measure_row_bytes(model.replica, row, model.device)
                per_row = model.catalog.costs.per_row * catalog.seconds / model.catalog.seconds
                costs = replace(model.catalog.costs, per_row=per_row, row_bytes=row_bytes)
                catalog = replace(catalog, costs=costs, tower=model.model_inputs.for_shapes(shapes).tower)
        model.catalogs.put_catalog(shapes, catalog)
    if functions and not catalog.has_functions:
        with run_noise(model.replica, model.threads):
            other = _survey(model, model.model_inputs.with_shapes(shapes), functions=True)
        catalog = catalog.with_functions(other)
        model.catalogs.put_catalog(shapes, catalog)
    return catalog


def survey_towers(model: LoadedModel) -> dict[Shapes, Catalog]:
    """The catalogs of each of two towers for its configured shape; InputError if one does not run alone."""
    return {tower.shapes: survey_shape(model, tower.shapes) for tower in model.model_inputs.towers if tower.tower}


def verify_resumption(model: LoadedModel, start: Tap, shapes: Shapes) -> Resumption:
    """How forwards of a shape resume from a tensor; tried if not cached.

    SelectorError if the model can't resume there, OutOfMemoryError.
    """
    key = start.point, shapes
    if model.catalogs.not_resumable.get(key):
        raise not_resumable_error(start.point)
    resumption = model.catalogs.resumptions.get(key)
    if resumption is None:
        catalog = survey_shape(model, shapes, functions=bool(start.point.function))
        specs = model.model_inputs.with_shapes(shapes)
        rows = make_noise(specs, model.device, model.dtype)
        try:
            with run_noise(model.replica, model.threads):
                resumption = verify_resumable(model.module, start, catalog, specs, model.replica, rows, model.dtype)
        except SelectorError:  # cached too, or each request for it would try again
            model.catalogs.not_resumable.put(key, True)
            raise
        model.catalogs.resumptions.put(key, resumption)
    return resumption


def _survey(model: LoadedModel, specs: Sequence[InputSpec], *, functions: bool = False) -> Catalog:
    tower = model.model_inputs.for_shapes(tuple(spec.shape for spec in specs))
    prefix = 0 if tower.tower == "texts" else model.prefix_tokens
    module, tolerance = model.module, TOLERANCE[model.spec.precision]
    catalog = survey(
        module, specs, model.replica, model.device, prefix, model.dtype, functions=functions, tolerance=tolerance
    )
    traits = model.catalog.traits
    crosses_rows = catalog.crosses_rows or not traits.deterministic or model.catalogs.crossing is not None
    return replace(catalog, crosses_rows=crosses_rows, traits=traits)


def _resize(model: LoadedModel, specs: Sequence[InputSpec]) -> Catalog | None:
    """The catalog of another shape by its sizes and time; None if that is not enough."""
    if model.model_inputs.mask is not None or any(spec.longest for spec in specs):
        return None  # for texts everything may depend on the length, and there are few lengths
    recorder = CallRecorder(model.module, look=lambda tensor: NO_SKETCH)
    watch = partial(recorder.watch, model.replica)
    costs = model.catalog.costs
    threads = model.threads if costs.speedup > 1 else 1  # as many as a request's forward uses
    with torch.no_grad(), use_threads(threads), name_input_errors(specs):
        row = make_noise(specs, model.device, model.dtype, rows=1)
        row_bytes, seconds = time_call(
            lambda: memory.measure_peak_bytes(watch, row, model.module, model.device), model.device
        )
        if seconds < QUICK_S:  # what watches it takes a part of that
            _, seconds = time_call(lambda: model.replica(copy_rows(row)), model.device)
    catalog = resize_catalog(model.catalog, model.module, recorder, model.prefix_tokens)
    if catalog is None:
        return None
    on_one_thread = seconds * (costs.speedup if threads > 1 else 1.0)
    per_row = max(on_one_thread - costs.base, costs.per_row * seconds / model.catalog.seconds)
    return replace(catalog, seconds=seconds, costs=replace(costs, per_row=per_row, row_bytes=row_bytes))


def _measure_row_bytes(replica: Replica, row: memory.Inputs, device: torch.device) -> int:
    with torch.no_grad(), use_threads(1):
        return memory.measure_peak_bytes(replica, row, replica.module, device)
