"""Times of a model's forwards: measured at each load, and kept in a file.

The median of several loads' readings is used, so that a noisy one has no effect.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Annotated, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter

from layertap.models.catalog.catalog import Costs
from layertap.models.devices import transfer
from layertap.models.devices.devices import use_threads
from layertap.models.devices.memory import Forward, Inputs

log = logging.getLogger("layertap")
BATCH_ROWS = 4  # rows of the larger forward
MIN_ROUNDS, MAX_QUICK_ROUNDS, ROUNDS_S = 2, 8, 0.5  # fewest and most rounds, and seconds after which none starts
MIN_PAIRS, MAX_ROUNDS, PAIRS_S = 5, 25, 3.0  # the same for pairs of one row on one core and on all cores
ROUNDS_AGAIN = 3  # rounds if earlier loads have readings
CLEAR_SHARE = 0.8  # the share of rounds that must agree
MAX_FORWARD_S = 3.0  # a larger forward that is expected to take longer is not run
MIN_THREADED_S = 0.005  # a faster forward has too little work for several threads
MIN_SPEEDUP = 1.15  # if all threads are not this much faster than one, one is used
MAX_READINGS = 9  # newest readings that are kept for a model
MAX_FILES = 1000  # in a folder
MAX_FILE_BYTES = 2**16
RECIPE = 1  # raise it when the way of measuring changes
T = TypeVar("T")
Figure = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]  # a measured number
ONLY_FIGURES = ConfigDict(extra="forbid")  # for dataclasses that are stored as JSON
Rounds = dict[str, list[float]]  # seconds, by kind of forward


@dataclass(frozen=True)
class ForwardSeconds:
    """One reading: seconds of a forward of one row, of each further row, and the speedup of one row on all cores.

    ``speedup`` may be below 1.
    """

    __pydantic_config__ = ONLY_FIGURES

    one: Figure
    per_row: Figure
    speedup: Figure = 1.0


def measure_forward(
    forward: Forward, row: Inputs, device: torch.device, *, crosses_rows: bool, max_threads: int, again: bool = False
) -> ForwardSeconds:
    """Measure how long forwards take; ``row`` is a batch of one, which is not modified.

    Runs forwards without grad, in the calling thread, which must own the module: in turn one row, several rows, and on
    a CPU one row with ``max_threads`` threads. The minimum counts, because noise only adds time; the speedup is the
    median over pairs of consecutive forwards. ``again``: a few rounds are enough, because earlier loads have readings.
    """
    with torch.no_grad(), use_threads(1):
        start = time.thread_time()
        one = _measure_seconds(forward, row, device)
        busy = time.thread_time() - start  # CPU time only: waiting on a busy machine can't be parallelised
        if one > MAX_FORWARD_S:
            return ForwardSeconds(one, one)
        kinds = {"one": (row, 1)}
        if not crosses_rows and one * BATCH_ROWS <= MAX_FORWARD_S:
            kinds["several"] = ({name: value.expand(BATCH_ROWS, *value.shape[1:]) for name, value in row.items()}, 1)
        if device.type == "cpu" and max_threads > 1 and busy >= MIN_THREADED_S:
            kinds["all_cores"] = (row, max_threads)
        rounds = _measure_rounds(forward, kinds, device, ROUNDS_AGAIN if again else MAX_ROUNDS)
    one = min(rounds["one"])
    several = min(rounds.get("several", [one * BATCH_ROWS]))
    per_row = min(max((several - one) / (BATCH_ROWS - 1), one / (2 * BATCH_ROWS)), one)
    return ForwardSeconds(one, per_row, median(_list_speedups(rounds)))


def make_costs(readings: Sequence[ForwardSeconds], row_bytes: int) -> Costs:
    """The costs from several readings: the median of each figure; a speedup below ``MIN_SPEEDUP`` counts as 1."""
    one = median(reading.one for reading in readings)
    per_row = min(median(reading.per_row for reading in readings), one)
    speedup = median(reading.speedup for reading in readings)
    return Costs(one - per_row, per_row, row_bytes, speedup if speedup >= MIN_SPEEDUP else 1.0)


def _list_speedups(rounds: Rounds) -> list[float]:
    """The speedup of a row on all cores over one core, round by round."""
    return [one / all_cores for one, all_cores in zip(rounds["one"], rounds.get("all_cores", ()), strict=False)] or [
        1.0
    ]


def _measure_rounds(
    forward: Forward, kinds: Mapping[str, tuple[Inputs, int]], device: torch.device, most: int
) -> Rounds:
    """Seconds of each kind of forward, round by round, in ``most`` rounds at most; ``kinds``: inputs and threads."""
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


def _is_clear(speedups: Sequence[float]) -> bool:
    """Whether most rounds agree on whether all cores are worth using."""
    share = sum(speedup >= MIN_SPEEDUP for speedup in speedups) / len(speedups)
    return max(share, 1 - share) >= CLEAR_SHARE


def _measure_seconds(forward: Forward, rows: Inputs, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    return time_call(lambda: forward(batch), device)[1]


def time_call(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a function returns, and the seconds until the device has computed it."""
    start = _now(device)
    result = function()
    return result, max(_now(device) - start, 1e-6)


def _now(device: torch.device) -> float:
    transfer.synchronize(device)
    return time.perf_counter()


def locate_history(folder: Path, *parts: object) -> Path:
    """The file for a model's readings, named by a digest of ``parts``: everything that affects a forward's time."""
    text = json.dumps([RECIPE, *parts], default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def add_reading(path: Path, reading: ForwardSeconds) -> Sequence[ForwardSeconds]:
    """Append a reading to a JSON file; return the newest readings, this one last.

    If the file can't be read or written, only this reading is returned.
    """
    try:
        readings = [*(read_figures(path, list[ForwardSeconds]) or ()), reading][-MAX_READINGS:]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _remove_oldest(path.parent)
        write_figures(path, [asdict(each) for each in readings])
    except OSError as error:
        log.info("readings of costs are not kept", extra={"fields": {"reason": type(error).__name__}})
        return [reading]
    return readings


def _remove_oldest(folder: Path) -> None:
    """Make room for one more file; the modification time is that of the last use, which rewrites a file."""
    with suppress(FileNotFoundError):  # another process may remove them too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: max(len(files) - MAX_FILES + 1, 0)]:
            file.unlink()


def read_figures(path: Path, kind: type[T]) -> T | None:
    """The figures in a file; None if it is missing or damaged; OSError if it can't be read and should be kept."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
        raise OSError("it is no regular file")
    try:
        with path.open("rb") as file:
            return TypeAdapter(kind).validate_json(file.read(MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.info("measured figures are not used", extra={"fields": {"reason": type(error).__name__}})
        return None


def write_figures(path: Path, value: object) -> None:
    """Write plain data as JSON, replacing the file atomically; OSError if it can't be written."""
    folder = path.parent
    with NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            json.dump(value, file)
            file.flush()
            part.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)  # users who share the folder can read the file
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
