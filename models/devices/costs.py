"""What forwards of a model take in time and memory, measured when it is loaded, not guessed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from layertap.models.catalog.catalog import Costs
from layertap.models.devices.memory import Forward, Rows, measure_peak_bytes
from layertap.models.devices.threads import use_threads

BATCH_ROWS = 4  # rows of the larger forward
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_S = 2, 8, 0.5  # rounds of forwards
SINGLE_ROW_ROUNDS = 5  # rounds of one row: whether all cores are worth it depends on a small difference
MAX_FORWARD_S = 3.0  # a larger forward that is expected to take longer is not run
MIN_THREADED_S = 0.005  # a quicker forward has too little to share out
MIN_SPEEDUP = 1.15  # all threads must be that much quicker than one, or one does


def measure_costs(
    forward: Forward, row: Rows, module: nn.Module, device: torch.device, rowwise: bool, max_threads: int
) -> Costs:
    """What a forward of so many rows takes; ``row`` is a batch of one, which stays as it is.

    Runs some forwards, without a graph, in the thread that owns the module: of one row, of several, and on a CPU of
    one with so many threads as ``max_threads``, in turn. Of each the quickest counts: whatever disturbs a
    machine only adds.
    """
    with torch.no_grad(), use_threads(1):
        memory = measure_peak_bytes(forward, row, module, device)
        one = _measure_seconds(forward, row, device)
        kinds = {"one": (row, 1)}
        if rowwise and one * BATCH_ROWS <= MAX_FORWARD_S:
            kinds["several"] = ({name: value.expand(BATCH_ROWS, *value.shape[1:]) for name, value in row.items()}, 1)
        if device.type == "cpu" and max_threads > 1 and MIN_THREADED_S <= one <= MAX_FORWARD_S:
            kinds["all_cores"] = (row, max_threads)
        best = _measure_quickest(forward, kinds, device) if one <= MAX_FORWARD_S else {"one": one}
    one, several = best["one"], best.get("several", best["one"] * BATCH_ROWS)
    per_row = min(max((several - one) / (BATCH_ROWS - 1), one / (2 * BATCH_ROWS)), one)
    speedup = one / best.get("all_cores", one)
    return Costs(one - per_row, per_row, memory, speedup if speedup >= MIN_SPEEDUP else 1.0)


def _measure_quickest(
    forward: Forward, kinds: Mapping[str, tuple[Rows, int]], device: torch.device
) -> dict[str, float]:
    """The least seconds of each kind of forward: rows and threads."""
    rounds: dict[str, list[float]] = {name: [] for name in kinds}
    fewest = {
        "several": MIN_ROUNDS,
        "one": SINGLE_ROW_ROUNDS if "all_cores" in kinds else MIN_ROUNDS,
        "all_cores": SINGLE_ROW_ROUNDS,
    }
    start = time.perf_counter()
    for number in range(MAX_ROUNDS):
        early = time.perf_counter() - start < ROUNDS_S
        for name, (rows, count) in kinds.items():
            if early or number < fewest[name]:
                with use_threads(count):
                    rounds[name].append(_measure_seconds(forward, rows, device))
    return {name: min(seconds) for name, seconds in rounds.items()}


def _measure_seconds(forward: Forward, rows: Rows, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    start = _now(device)
    forward(batch)
    return max(_now(device) - start, 1e-6)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
