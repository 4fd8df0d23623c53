"""How long a model's forwards take, measured when it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch

from layertap.models.catalog.catalog import Costs
from layertap.models.devices import transfer
from layertap.models.devices.devices import use_threads
from layertap.models.devices.memory import Forward, Inputs

BATCH_ROWS = 4  # rows of the larger forward
MIN_ROUNDS, MAX_QUICK_ROUNDS, ROUNDS_S = 2, 8, 0.5  # fewest and most rounds, and seconds after which none starts
MIN_PAIRS, MAX_ROUNDS, PAIRS_S = 5, 25, 3.0  # the same for pairs of one row on one core and on all cores
CLEAR_SHARE = 0.8  # the share of rounds that must agree
MAX_FORWARD_S = 3.0  # a larger forward that is expected to take longer is not run
MIN_THREADED_S = 0.005  # a faster forward has too little work for several threads
MIN_SPEEDUP = 1.15  # if all threads are not this much faster than one, one is used
T = TypeVar("T")
Rounds = dict[str, list[float]]  # seconds, by kind of forward


def measure_costs(
    forward: Forward, row: Inputs, device: torch.device, row_bytes: int, *, crosses_rows: bool, max_threads: int
) -> Costs:
    """Measure how long forwards take; ``row`` is a batch of one, which is not modified.

    Runs forwards without grad, in the calling thread, which must own the module: in turn one row, several rows, and on
    a CPU one row with ``max_threads`` threads. The minimum counts, because noise only adds time; the speedup is the
    median over pairs of consecutive forwards, and 1 if it is below ``MIN_SPEEDUP``.
    """
    with torch.no_grad(), use_threads(1):
        start = time.thread_time()
        one = _measure_seconds(forward, row, device)
        busy = time.thread_time() - start  # CPU time only: waiting on a busy machine can't be parallelised
        if one > MAX_FORWARD_S:
            return Costs(0.0, one, row_bytes)
        kinds = {"one": (row, 1)}
        if not crosses_rows and one * BATCH_ROWS <= MAX_FORWARD_S:
            kinds["several"] = ({name: value.expand(BATCH_ROWS, *value.shape[1:]) for name, value in row.items()}, 1)
        if device.type == "cpu" and max_threads > 1 and busy >= MIN_THREADED_S:
            kinds["all_cores"] = (row, max_threads)
        rounds = _measure_rounds(forward, kinds, device)
    one = min(rounds["one"])
    several = min(rounds.get("several", [one * BATCH_ROWS]))
    per_row = min(max((several - one) / (BATCH_ROWS - 1), one / (2 * BATCH_ROWS)), one)
    speedup = median(_list_speedups(rounds) or [1.0])
    return Costs(one - per_row, per_row, row_bytes, speedup if speedup >= MIN_SPEEDUP else 1.0)


def _measure_rounds(forward: Forward, kinds: Mapping[str, tuple[Inputs, int]], device: torch.device) -> Rounds:
    """Seconds of each kind of forward, round by round; ``kinds``: inputs and threads."""
    rounds: Rounds = {name: [] for name in kinds}
    start = time.perf_counter()
    for number in range(MAX_ROUNDS):
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
    return [one / all_cores for one, all_cores in zip(rounds["one"], rounds.get("all_cores", ()), strict=False)]


def _is_clear(speedups: Sequence[float]) -> bool:
    """Whether most rounds agree on whether all cores are worth using."""
    share = sum(speedup >= MIN_SPEEDUP for speedup in speedups) / len(speedups)
    return max(share, 1 - share) >= CLEAR_SHARE


def _measure_seconds(forward: Forward, rows: Inputs, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    return time_call(lambda: forward(batch), device)[1]


def time_call(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a function returns, and the seconds until the device has computed it."""
    transfer.synchronize(device)
    start = time.perf_counter()
    result = function()
    transfer.synchronize(device)
    return result, max(time.perf_counter() - start, 1e-6)
