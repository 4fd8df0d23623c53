"""Times of a model's forwards: measured when it is loaded, and kept from load to load.

The median of several loads' readings is used, so that a noisy one does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
import time
from collections.abc import Mapping, Sequence
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
MIN_ROUNDS, MAX_QUICK_ROUNDS, ROUNDS_S = 2, 8, 0.5  # rounds of forwards, and seconds after which there are no more
MIN_PAIRS, MAX_ROUNDS, PAIRS_S = 5, 25, 3.0  # the same of one row on one core and on all
ROUNDS_AGAIN = 3  # where other loads have measured it
CLEAR_SHARE = 0.8  # of these rounds: they agree
MAX_FORWARD_S = 3.0  # a larger forward that is expected to take longer is not run
MIN_THREADED_S = 0.005  # a quicker forward has too little to share out
MIN_SPEEDUP = 1.15  # all threads must be that much quicker than one, or one does
MAX_READINGS = 9  # of a model that are kept: the newest
MAX_FILES = 1000  # in a folder
MAX_FILE_BYTES = 2**16
RECIPE = 1  # to be raised where seconds are measured otherwise
T = TypeVar("T")
Figure = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]  # one that was measured
ONLY_FIGURES = ConfigDict(extra="forbid")  # of a dataclass of figures in a file
Rounds = dict[str, list[float]]  # seconds, by kind of forward


@dataclass(frozen=True)
class ForwardSeconds:
    """One reading: seconds of a forward of one row, of a row more, and how much quicker one row was on all cores.

    ``speedup`` may be below 1.
    """

    __pydantic_config__ = ONLY_FIGURES

    one: Figure
    per_row: Figure
    speedup: Figure = 1.0


def measure_forward(
    forward: Forward, row: Inputs, device: torch.device, *, crosses_rows: bool, max_threads: int, again: bool = False
) -> ForwardSeconds:
    """How long forwards take; ``row`` is a batch of one, which stays as it is.

    Runs some forwards, without a graph, in the thread that owns the module: of one row, of several, and on a CPU of
    one with ``max_threads`` threads, in turn. The least of the seconds counts, for noise
    only adds; of what all threads gain, the median of forwards that ran one right after the other. ``again``: there
    are readings of other loads, which this one need not outdo, and a few rounds do.
    """
    with torch.no_grad(), use_threads(1):
        start = time.thread_time()
        one = _measure_seconds(forward, row, device)
        busy = time.thread_time() - start  # on a busy machine waiting is no work that could be shared out
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
    """How much quicker a row was on all cores than on one, round by round."""
    return [one / all_cores for one, all_cores in zip(rounds["one"], rounds.get("all_cores", ()), strict=False)] or [
        1.0
    ]


def _measure_rounds(
    forward: Forward, kinds: Mapping[str, tuple[Inputs, int]], device: torch.device, most: int
) -> Rounds:
    """The seconds of each kind of forward, rows and threads, round by round, of which there are so many at most."""
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
    """Whether a round has a kind of forward: all in short, and pairs for longer while it is not clear what they say."""
    if number < MIN_ROUNDS or (seconds < ROUNDS_S and number < MAX_QUICK_ROUNDS):
        return True
    if name == "several" or "all_cores" not in rounds:
        return False
    return number < MIN_PAIRS or (seconds < PAIRS_S and not _is_clear(_list_speedups(rounds)))


def _is_clear(speedups: Sequence[float]) -> bool:
    """Whether most rounds agree on whether all cores pay."""
    share = sum(speedup >= MIN_SPEEDUP for speedup in speedups) / len(speedups)
    return max(share, 1 - share) >= CLEAR_SHARE


def _measure_seconds(forward: Forward, rows: Inputs, device: torch.device) -> float:
    batch = {name: value.clone() for name, value in rows.items()}
    start = _now(device)
    forward(batch)
    return max(_now(device) - start, 1e-6)


def _now(device: torch.device) -> float:
    transfer.synchronize(device)
    return time.perf_counter()


def locate_history(folder: Path, *parts: object) -> Path:
    """The file in a folder for readings of what these parts say: all that a forward's time depends on."""
    text = json.dumps([RECIPE, *parts], default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def add_reading(path: Path, reading: ForwardSeconds) -> Sequence[ForwardSeconds]:
    """A reading after the newest of those before it in a JSON file, and kept there with them.

    A file that can't be read or written costs nothing but the readings of other loads.
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
    """Make room for one more file; each is written again whenever it is used."""
    with suppress(FileNotFoundError):  # another process may remove them too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: max(len(files) - MAX_FILES + 1, 0)]:
            file.unlink()


def read_figures(path: Path, kind: type[T]) -> T | None:
    """What a file holds; None if there is none, or a damaged one; OSError if it can't be read: keep it."""
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
    """Replace a file by plain data as JSON; OSError if it can't be written."""
    folder = path.parent
    with NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            json.dump(value, file)
            file.flush()
            part.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)  # others share a folder that is theirs too
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
