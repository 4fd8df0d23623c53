"""Three small forwards that tell everything a catalogue knows.

One takes a single row, one is timed, and one takes the same row between two others: what grew is the row axis, and
what the row left behind when it was alone must be there again, or rows are not independent. A model that can't take
several rows, or takes another course with them, is catalogued from the first and runs one row at a time. What a
device raises, for want of memory or for good, says nothing of the model and goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_observer import CallTimer, Run
from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.catalog_builder import CatalogBuilder, LengthProbe
from layertap.models.devices.memory import is_device_error
from layertap.models.errors import IN_THE_LOG, InputError
from layertap.models.inputs.noise import copy_row, make_noise
from layertap.models.spec import InputSpec

MAX_TIMED, ENOUGH_S = 5, 0.1  # timed forwards: how many at most, and after how many seconds no further one
# What torch and models raise for a wrong shape.
SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def survey(
    module: nn.Module,
    inputs: Sequence[InputSpec],
    run: Run,
    device: torch.device,
    prefix: int,
    dtype: torch.dtype,
    *,
    functions: bool = False,
) -> Catalog:
    """The catalogue of a module for one shape of input.

    ``inputs`` gives the shapes of one row; ``run`` calls the module with a batch of such rows; ``prefix`` is the
    number of tokens that stand before the patches; floating inputs come in ``dtype``. With ``functions`` it tells
    what these return. InputError where the module can't take that shape.
    """
    rows = make_noise(inputs, device, dtype)
    # Not inference mode: what a model keeps of its first forward (tables, caches) must be fit for gradients later.
    with torch.no_grad():
        alone = CallRecorder(module, functions=functions)
        with name_input_errors(inputs):
            alone.watch(run, copy_row(rows))
            timer = _time_calls(module, run, copy_row(rows), device)
        several = CallRecorder(module, alone=alone, functions=functions)
        try:
            several.watch(run, rows)
        except Exception as error:  # whatever a model raises, it means the same: not several rows at once
            if is_device_error(error):
                raise
            several = alone
        length_probe = _probe_length(CallRecorder(module, functions=functions), inputs, run, device, dtype)
    if several.summarize_calls() != alone.summarize_calls():
        several = alone
    return CatalogBuilder(module, alone, several, timer, prefix, length_probe).build()


def _time_calls(module: nn.Module, run: Run, row: Mapping[str, Tensor], device: torch.device) -> CallTimer:
    """The quickest of a few forwards, of one where it takes long: whatever disturbs a machine only adds."""
    timers: list[CallTimer] = []
    while len(timers) < MAX_TIMED and sum(timer.total for timer in timers) < ENOUGH_S:
        timers.append(CallTimer(module, device))
        timers[-1].watch(run, row)
    return min(timers, key=lambda timer: timer.total)


def _probe_length(
    recorder: CallRecorder, inputs: Sequence[InputSpec], run: Run, device: torch.device, dtype: torch.dtype
) -> LengthProbe | None:
    """A forward of a text one token longer or shorter; None where all rows have one length, or the model takes one."""
    text = next((spec for spec in inputs if spec.longest is not None), None)
    if text is None or text.longest == 1:
        return None
    length = text.shape[0]
    other = length - 1 if length == text.longest else length + 1
    specs = [replace(spec, shape=(other, *spec.shape[1:])) if spec.longest else spec for spec in inputs]
    try:
        recorder.watch(run, copy_row(make_noise(specs, device, dtype)))
    except Exception as error:  # whatever a model raises, it means the same
        if is_device_error(error):
            raise
        return None
    return LengthProbe(recorder, (length, other))


@contextmanager
def name_input_errors(inputs: Sequence[InputSpec]) -> Iterator[None]:
    """Raise InputError for whatever a forward of rows of these shapes raises, unless it is the device's."""
    try:
        yield
    except Exception as error:
        if is_device_error(error):
            raise
        raise _input_error(error, inputs) from error


def _input_error(error: Exception, inputs: Sequence[InputSpec]) -> InputError:
    """What a forward's error means: of a shape it may be one of the model's own bugs too, others are nothing else."""
    cause = f"the model's own forward raised {type(error).__name__}"
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
    if isinstance(error, SHAPE_ERRORS) and not isinstance(error, NotImplementedError | RecursionError):
        return InputError(
            f"the model can't take an input of this shape: {shapes}, or has a bug: {cause}", hint=IN_THE_LOG
        )
    return InputError(f"{cause} for an input of shape {shapes}", hint=IN_THE_LOG)
