"""What forwards of a model take in time and memory, measured when it is loaded, not guessed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from layertap.models.catalog.catalog import Costs
from layertap.models.devices.memory import Forward, Rows, measure_peak_bytes
from layertap.models.devices.threads import use_threads

SEVERAL = 4  # rows of the larger forward
FEWEST, MOST, ENOUGH_S = 2, 8, 0.5  # rounds of forwards
SINGLE = 5  # rounds of one row: whether all cores are worth it hangs on a small difference
PATIENCE_S = 3.0  # a larger forward that is expected to take longer is not run
LEAST_S = 0.005  # a quicker forward has too little to share out
WORTH = 1.15  # all threads must be that much quicker than one, or one does


def measure_costs(
    forward: Forward, row: Rows, module: nn.Module, device: torch.device, rowwise: bool, most: int
) -> Costs:
    """What a forward of so many rows takes; ``row`` is a batch of one, which stays as it is.

    Runs some forwards, without a graph, in the thread that owns the module: of one row, of several, and on a CPU of
    one with so many threads as there may be at ``most``, in turn. Of each the quickest counts: whatever disturbs a
    machine only adds.
    """
    with torch.no_grad(), use_threads(1):
        memory = measure_peak_bytes(forward, row, module, device)
        one = _seconds(forward, row, device)
        kinds = {"one": (row, 1)}
        if rowwise and one * SEVERAL <= PATIENCE_S:
            kinds["several"] = ({name: value.expand(SEVERAL, *value.shape[1:]) for name, value in row.items()}, 1)
        if device.type == "cpu" and most > 1 and LEAST_S <= one <= PATIENCE_S:
            kinds["all_cores"] = (row, most)
        best = _quickest(forward, kinds, device) if one <= PATIENCE_S else {"one": one}
    one, several = best["one"], best.get("several", best["one"] * SEVERAL)
    per_row = min(max((several - one) / (SEVERAL - 1), one / (2 * SEVERAL)), one)
    speedup = one / best.get("all_cores", one)
    return Costs(one - per_row, per_row, memory, speedup if speedup >= WORTH else 1.0)


def _quickest(forward: Forward, kinds: Mapping[str, tuple[Rows, int]], device: torch.device) -> dict[str, float]:
    """The least seconds of each kind of forward: rows and threads."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    fewest = {"several": FEWEST, "one": SINGLE if "all_cores" in kinds else FEWEST, "all_cores": SINGLE}
    begun = time.perf_counter()
    for number in range(MOST):
        early = time.perf_counter() - begun < ENOUGH_S
        for name, (rows, count) in kinds.items():
            if early or number < fewest[name]:
                with use_threads(count):
                    found[name].append(_seconds(forward, rows, device))
    return {name: min(seconds) for name, seconds in found.items()}


def _seconds(forward: Forward, rows: Rows, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    begun = _now(device)
    forward(batch)
    return max(_now(device) - begun, 1e-6)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
