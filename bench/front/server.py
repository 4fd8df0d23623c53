"""``layertap serve`` whose workers decode one picture each, and give its row for every other: here and nowhere else.

Workers are copies of this process, so that they have what is put in place here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.front import DECODE_FIRST
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.run.model_info import ModelInfo
from layertap.service.cli.main import main
from layertap.service.engine.execute.decode import try_to_decode
from layertap.service.engine.execute.processes import loading, worker
from layertap.service.engine.execute.processes.process_executor import ProcessExecutor
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.engine.rows import Attempt
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

_first: list[Sequence[Attempt]] = []


def decode_once(item: LocalItem, inputs: ModelInputs, settings: Settings, in_worker: bool) -> Sequence[Attempt]:
    """What became of the first item that this process was given."""
    if not _first:
        _first.append(try_to_decode(item, inputs, settings, in_worker))
    return _first[0]


def make_executor_that_decodes_first(model: ModelInfo, workers: WorkerPool, settings: Settings) -> ProcessExecutor:
    """One whose batches have decoded rows, as a GPU's have."""
    made = ProcessExecutor(model, workers, settings)
    made.decodes_batches, made.max_decode_items = False, int(os.environ[DECODE_FIRST])
    return made


if __name__ == "__main__":
    vars(worker)["try_to_decode"] = decode_once
    if DECODE_FIRST in os.environ:
        vars(loading)["ProcessExecutor"] = make_executor_that_decodes_first
    main()
