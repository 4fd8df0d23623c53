"""Whether forwards can go on from a layer's output: tried once, before anybody gets an answer.

A whole forward is compared with one that goes on from what left the layer in it, tensor by tensor. The modules that
are skipped in the second one were seen with another row: whatever of theirs comes through makes a difference. So does
what a module kept of its last forward: that was the other row's. A comparison hides a NaN, masks and whole numbers have
none, and all of these may happen to be the same in both forwards: what is computed from placeholders is followed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices.memory import is_device_error
from layertap.models.module_state import ModuleState
from layertap.models.resume.recorders import MarkRecorder, PlaceholderRecorder, ResumedMarkRecorder
from layertap.models.resume.resumed_catalog import Trial
from layertap.models.resume.resumption import Forward, Inputs, Resumption, not_resumable_error
from layertap.models.resume.skipped_calls import find_skipped_calls
from layertap.models.selection.hook_points import HookPoint
from layertap.models.spec import InputSpec


def verify_resumable(
    module: nn.Module,
    start: tuple[HookPoint, TensorInfo],
    catalog: Catalog,
    inputs: tuple[InputSpec, ...],
    run: Forward,
    rows: Inputs,
    dtype: torch.dtype,
) -> Resumption:
    """Forwards that go on from a point, after a trial of three; SelectorError where the model has none.

    ``rows`` are a few, in ``dtype`` where they are floating. Of the first one only structures are kept. What a device
    raises for want of memory, or for good, goes through: it says nothing of the model.
    """
    point, leaf = start
    skipped = find_skipped_calls(module, point, catalog)
    first = {name: value[:1].clone() for name, value in rows.items()}
    others = {name: value[1:].clone() if catalog.rowwise else value[1:2].clone() for name, value in rows.items()}
    before = ModuleState(module)
    whole, resumed = MarkRecorder(module, point), ResumedMarkRecorder(module, point, skipped)
    try:
        with torch.no_grad():
            whole.watch(lambda rows: run(rows, module), others)
            placeholders = PlaceholderRecorder(module, skipped, catalog)
            placeholders.watch(lambda rows: run(rows, module), first)
            draft = Resumption(point, leaf, catalog, inputs, dtype, placeholders.collect())
            run_tainted = resumed.with_taint(run)
            resumed.watch(lambda rows: draft.forward(run_tainted, module, rows["sent"]), {"sent": whole.get_output()})
    except Exception as error:  # whatever a model raises where it finds NaN, it means the same
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    finally:
        written = before.find_changes()
        before.put_back(written)
    if written:
        raise not_resumable_error(point)
    trial = Trial(module, point, skipped, whole.marks, resumed.marks)
    return replace(draft, catalog=trial.build_catalog(catalog))
