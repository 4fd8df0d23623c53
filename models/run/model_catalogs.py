"""Catalogs, costs and other findings from forwards of noise, measured when first needed and cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from operator import itemgetter
from statistics import median
from typing import TypeVar

import torch

from layertap.models.catalog.call_recorder import NO_SKETCH, CallRecorder
from layertap.models.catalog.catalog import Catalog, Costs
from layertap.models.catalog.survey import name_input_errors, resize_catalog, survey
from layertap.models.catalog.trials import is_same_again, run_alone, try_forward, try_padding
from layertap.models.devices import memory, transfer
from layertap.models.devices.devices import TOLERANCE, is_accelerator, use_threads
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.errors import SelectorError, out_of_memory_error
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.noise import copy_rows, make_noise, make_noise_row
from layertap.models.plan.plan import Tap
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica, may_stop
from layertap.models.run.resumption import Resumption, not_resumable_error, verify_resumable
from layertap.models.spec import InputSpec, Shapes

QUICK_S = 0.5  # CPU-seconds of a forward for which one thread is enough: further threads would only spin
BATCH_ROWS = 4  # rows of the larger forward
MIN_ROUNDS, MAX_QUICK_ROUNDS, ROUNDS_S = 2, 8, 0.5  # fewest and most rounds, and seconds after which none starts
MIN_PAIRS, MAX_ROUNDS, PAIRS_S = 5, 25, 3.0  # the same for pairs of one row on one core and on all cores
CLEAR_SHARE = 0.8  # the share of rounds that must agree
MAX_FORWARD_S = 3.0  # a larger forward that is expected to take longer is not run
MAX_TIMED_S = 1.0  # the same where another shape is surveyed
MIN_THREADED_S = 0.005  # a faster forward has too little work for several threads
MIN_SPEEDUP = 1.15  # if all threads are not this much faster than one, one is used
MIN_OWN_SHARE = 0.3  # of the time, for which a forward computes in its own thread; else it waits, or others compute
T = TypeVar("T")
Seconds = tuple[float, float]  # of a forward, and of them those in which its thread computed
Rounds = dict[str, list[Seconds]]  # by kind of forward
WALL, OWN = itemgetter(0), itemgetter(1)


def survey_configured(
    replica: Replica, inputs: ModelInputs, device: torch.device, prefix_tokens: int, threads: int, tolerance: float
) -> Catalog:
    """The catalog of a module for rows of the configured shape, which it has not run yet; InputError.

    ``tolerance``: how far rounding may move a value, as a share of the tensor's largest. OutOfMemoryError.
    """
    with run_noise(replica, threads):
        catalog = _survey_configured(replica, inputs, device, prefix_tokens, tolerance)
        row = make_noise_row(inputs.specs, device, inputs.dtype)
        row_bytes, crosses_rows = _measure_row_bytes(replica, row), catalog.crosses_rows
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
            look = partial(
                survey,
                replica.module,
                inputs.specs,
                replica,
                device,
                prefix_tokens,
                inputs.dtype,
                tolerance=tolerance,
                frames=inputs.frames,
            )
            catalog = look()
            crosses_rows = catalog.crosses_rows or not catalog.batches
            batch_axes = _try_batch_axes(replica, inputs, look) if crosses_rows else ()
            padding = try_padding(replica, inputs.text, device, tolerance) if inputs.text else None
            stops = may_stop(replica, row)
            is_same = is_same_again(replica, row, output)
    replica.restore(thorough=True)
    state = tuple(sorted(replica.found))
    traits = replace(catalog.traits, state=state, stops=stops, deterministic=is_same, batch_axes=batch_axes)
    if padding is not None and is_same:
        # A model that replaces submodules according to the text's length would react to padding, too (BigBird).
        if any(attribute in replica.module.get_submodule(name)._modules for name, attribute in state):
            padding = False, "refused"
        traits = replace(traits, pads=padding[0], left_padding=padding[1])
    # If answers vary, an effect of other rows can't be measured: each row runs alone.
    return replace(catalog, crosses_rows=catalog.crosses_rows or not is_same, traits=traits)


def _try_batch_axes(replica: Replica, inputs: ModelInputs, look: Callable[[], Catalog]) -> tuple[str, ...]:
    """The inputs whose rows do not affect each other on axis 1 of a batch; none if the configuration gives an axis.

    ``look`` surveys the module. A mask of tokens may have its rows on axis 0 beside tokens that have them on axis 1.
    """
    if inputs.text is not None or any(spec.batch_axis is not None for spec in inputs.specs):
        return ()
    try:
        for fewest in (1, 2):
            names = tuple(spec.name for spec in inputs.specs if len(spec.shape) >= fewest)
            replica.batch_axes = dict.fromkeys(names, 1)
            catalog = try_forward(look) if names else None
            if catalog is not None and catalog.batches and not catalog.crosses_rows:
                return names
    finally:
        replica.batch_axes = {}
    return ()


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


def measure_costs(
    forward: Forward,
    row: Inputs,
    device: torch.device,
    row_bytes: int,
    *,
    crosses_rows: bool,
    max_threads: int,
    most_rounds: int = MAX_ROUNDS,
) -> Costs:
    """Measure how long forwards take; ``row`` is a batch of one, which is not modified.

    Runs forwards without grad, in the calling thread, which must own the module: in turn one row, several rows, and on
    a CPU one row with ``max_threads`` threads. The minimum counts, because noise only adds time; on a CPU that of the
    thread's own time, to which other processes add nothing, unless it mostly waits. The speedup is the median over
    pairs of consecutive forwards, and 1 if it is below ``MIN_SPEEDUP``.
    """
    with torch.no_grad(), use_threads(1):
        one, busy = _measure_seconds(forward, row, device)
        if one > MAX_FORWARD_S:
            return Costs(0.0, one, row_bytes)
        kinds = {"one": (row, 1)}
        if not crosses_rows and one * BATCH_ROWS <= MAX_FORWARD_S:
            kinds["several"] = ({name: value.expand(BATCH_ROWS, *value.shape[1:]) for name, value in row.items()}, 1)
        if not is_accelerator(device) and max_threads > 1 and busy >= MIN_THREADED_S:
            kinds["all_cores"] = (row, max_threads)
        rounds = _measure_rounds(forward, kinds, device, most_rounds)
    own, wall = (min(map(clock, rounds["one"])) for clock in (OWN, WALL))
    clock = OWN if own > MIN_OWN_SHARE * wall and not is_accelerator(device) else WALL
    one = min(map(clock, rounds["one"]))
    several = min(map(clock, rounds["several"])) if "several" in rounds else one * BATCH_ROWS
    per_row = min(max((several - one) / (BATCH_ROWS - 1), one / (2 * BATCH_ROWS)), one)
    speedup = median(_list_speedups(rounds) or [1.0])
    return Costs(one - per_row, per_row, row_bytes, speedup if speedup >= MIN_SPEEDUP else 1.0)


def _measure_rounds(
    forward: Forward, kinds: Mapping[str, tuple[Inputs, int]], device: torch.device, most: int
) -> Rounds:
    """Seconds of each kind of forward, round by round; ``kinds``: inputs and threads."""
    rounds: Rounds = {name: [] for name in kinds}
    start = time.perf_counter()
    for number in range(most):
        seconds = time.perf_counter() - start
        for name, (rows, count) in kinds.items():
            if _is_measured_again(name, number, seconds, rounds):
                with use_threads(count):
                    rounds[name].append(_measure_seconds(forward, rows, device))
    return rounds


def _is_measured_again(name: str, number: int, seconds: float, rounds: Rounds) -> bool:
    """Whether a round runs a kind of forward: first all kinds, then only pairs until their speedups are clear."""
    if number < MIN_ROUNDS or (seconds < ROUNDS_S and number < MAX_QUICK_ROUNDS):
        return True
    if name == "several" or "all_cores" not in rounds:
        return False
    return number < MIN_PAIRS or (seconds < PAIRS_S and not _is_clear(_list_speedups(rounds)))


def _list_speedups(rounds: Rounds) -> list[float]:
    """The speedup of a row on all cores over one core, round by round; none if they were not measured."""
    pairs = zip(rounds["one"], rounds.get("all_cores", ()), strict=False)
    return [WALL(one) / WALL(all_cores) for one, all_cores in pairs]


def _is_clear(speedups: Sequence[float]) -> bool:
    """Whether most rounds agree on whether all cores are worth using."""
    share = sum(speedup >= MIN_SPEEDUP for speedup in speedups) / len(speedups)
    return max(share, 1 - share) >= CLEAR_SHARE


def _measure_seconds(forward: Forward, rows: Inputs, device: torch.device) -> Seconds:
    batch = {name: value.clone() for name, value in rows.items()}
    start = time.thread_time()
    _, seconds = time_call(lambda: forward(batch), device)
    return seconds, max(time.thread_time() - start, 1e-6)


def time_call(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a function returns, and the seconds until the device has computed it."""
    transfer.synchronize(device)
    start = time.perf_counter()
    result = function()
    transfer.synchronize(device)
    return result, max(time.perf_counter() - start, 1e-6)


def survey_shape(
    model: LoadedModel, shapes: Shapes, *, functions: bool = False, base: Catalog | None = None
) -> Catalog:
    """The catalog of a shape, surveyed if not cached; InputError if the model does not take the shape.

    With ``functions`` it includes what functions return. ``base``: the catalog of another text that is continued by as
    many steps, of which all but sizes are the same. OutOfMemoryError.
    """
    catalog = model.catalogs.get_catalog(shapes)
    if catalog is None:
        specs = model.model_inputs.with_shapes(shapes)
        with run_noise(model.replica, model.threads):
            catalog = _resize(model, specs, base or model.catalog)
            if catalog is None:
                catalog = _time(model, _survey(model, specs), specs)
                catalog = replace(catalog, tower=model.model_inputs.for_shapes(shapes).tower)
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
            with run_noise(model.replica, model.threads), use_threads(_count_threads(model)):
                resumption = verify_resumable(model.module, start, catalog, specs, model.replica, rows, model.dtype)
        except SelectorError:  # cached too, or each request for it would try again
            model.catalogs.not_resumable.put(key, True)
            raise
        model.catalogs.resumptions.put(key, resumption)
    return resumption


def _survey(model: LoadedModel, specs: Sequence[InputSpec], *, functions: bool = False) -> Catalog:
    tower = model.model_inputs.for_shapes(tuple(spec.shape for spec in specs))
    prefix = 0 if tower.tower == "texts" else model.prefix_tokens
    with use_threads(_count_threads(model)):
        catalog = survey(
            model.module,
            specs,
            model.replica,
            model.device,
            prefix,
            model.dtype,
            functions=functions,
            tolerance=TOLERANCE[model.spec.precision],
            frames=tower.frames,
        )
    traits = model.catalog.traits
    crosses_rows = catalog.crosses_rows or not traits.deterministic or model.catalogs.crossing is not None
    may_stop_early = model.model_inputs.count_steps(tuple(spec.shape for spec in specs)) > 0
    return replace(catalog, crosses_rows=crosses_rows, traits=traits, branches=catalog.branches or may_stop_early)


def _resize(model: LoadedModel, specs: Sequence[InputSpec], base: Catalog) -> Catalog | None:
    """The catalog of another shape by its sizes and time, all else as in ``base``; None if that is not enough."""
    is_text = model.text is not None or (model.model_inputs.mask is not None and model.model_inputs.sound is None)
    if is_text and base is model.catalog:
        return None  # for texts everything may depend on the length, and there are few lengths
    recorder = CallRecorder(model.module, look=lambda tensor: NO_SKETCH)
    watch = partial(recorder.watch, model.replica)
    with torch.no_grad(), use_threads(_count_threads(model)), name_input_errors(specs):
        row = make_noise(specs, model.device, model.dtype, rows=1)
        row_bytes, seconds = time_call(lambda: memory.measure_peak_bytes(watch, row, model.module), model.device)
        if model.model_inputs.sound is not None:  # of which most have another length: no forward to time it
            seconds = min(seconds, model.catalog.seconds * _compare_sizes(model.shapes, specs))
        elif seconds < QUICK_S or base is not model.catalog:  # what watches it takes a part of that
            _, seconds = time_call(lambda: model.replica(copy_rows(row)), model.device)
    catalog = resize_catalog(base, model.module, recorder, model.prefix_tokens)
    if catalog is None:
        return None
    return replace(catalog, seconds=seconds, costs=_scale_costs(model, seconds, row_bytes))


def _time(model: LoadedModel, catalog: Catalog, specs: Sequence[InputSpec]) -> Catalog:
    """The catalog of another shape with its costs: measured if that is quick, else by the survey's forward."""
    row = make_noise_row(specs, model.device, model.dtype)
    row_bytes = _measure_row_bytes(model.replica, row)
    likely = min(catalog.seconds, model.catalog.seconds * _compare_sizes(model.shapes, specs))
    scaled = replace(catalog, costs=_scale_costs(model, catalog.seconds, row_bytes))
    if catalog.crosses_rows or likely * BATCH_ROWS > MAX_TIMED_S:
        return scaled
    measure, speedup = partial(measure_costs, max_threads=1, most_rounds=MIN_ROUNDS), model.catalog.costs.speedup
    try:
        measured = measure(model.replica, row, model.device, row_bytes, crosses_rows=False)
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        return scaled
    seconds = min(catalog.seconds, measured.estimate_seconds(1) / speedup)
    return replace(catalog, seconds=seconds, costs=replace(measured, speedup=speedup))


def _count_threads(model: LoadedModel) -> int:
    """As many threads as a request's forward of one row uses."""
    return model.threads if model.catalog.costs.speedup > 1 else 1


def _scale_costs(model: LoadedModel, seconds: float, row_bytes: int) -> Costs:
    """The costs of another shape by the seconds of a forward of one row on ``_count_threads`` threads.

    What does not depend on the number of rows is as for the configured shape.
    """
    costs = model.catalog.costs
    per_row = max(seconds * costs.speedup - costs.base, costs.per_row * seconds / model.catalog.seconds)
    return replace(costs, per_row=per_row, row_bytes=row_bytes)


def _compare_sizes(shapes: Shapes, specs: Sequence[InputSpec]) -> float:
    """How many times as many numbers a row has as one of these shapes."""
    return sum(prod(spec.shape) for spec in specs) / sum(map(prod, shapes))


def _measure_row_bytes(replica: Replica, row: Inputs) -> int:
    with torch.no_grad(), use_threads(1):
        return memory.measure_peak_bytes(replica, row, replica.module)
