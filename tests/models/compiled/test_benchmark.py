"""Benchmarks of warm plans that are kept from start to start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.models.compiled.benchmark import (
    PairedSeconds,
    PlanBenchmark,
    keep_benchmark,
    locate_benchmark,
    read_benchmark,
)
from layertap.models.devices.costs import ForwardSeconds

QUICK = PlanBenchmark(PairedSeconds(0.5, 0.25, 2.0), PairedSeconds(4.0, 1.0, 4.0), ForwardSeconds(0.25, 0.125, 1.5))
SLOW = replace(QUICK, one=PairedSeconds(0.25, 0.5, 0.5), several=None)
WHOLE: dict[str, Any] = asdict(QUICK)
FIGURES = (0, -1, None, "x", [], float("nan"), float("inf"), 10**400)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a benchmark is kept; the file is not there yet."""
    return tmp_path / "benchmark.json"


def test_speedup() -> None:
    """What is half as quick alone and twice as quick in a batch is neither."""
    assert QUICK.speedup == pytest.approx(8**0.5)
    assert SLOW.speedup == pytest.approx(0.5)
    even = replace(QUICK, one=SLOW.one, several=PairedSeconds(1.0, 0.5, 2.0))
    assert (QUICK.pays, SLOW.pays, even.pays) == (True, False, False)


@pytest.mark.parametrize("benchmark", [QUICK, SLOW])
def test_kept(path: Path, benchmark: PlanBenchmark) -> None:
    """What was measured once is what every later start reads, whatever that measures."""
    assert read_benchmark(path) is None
    assert keep_benchmark(path, benchmark) == benchmark
    text = path.read_bytes()
    for other in (QUICK, SLOW):
        assert keep_benchmark(path, other) == benchmark
    assert read_benchmark(path) == benchmark
    assert path.read_bytes() == text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        *("", "\xff", "{}", "[]", "[1]", "null", "[" * 100_000, " " * 100_000),
        *(json.dumps(WHOLE | {name: value}) for name in ("one", "costs") for value in (None, 1, [], {})),
        *(json.dumps(WHOLE | {"one": WHOLE["one"] | {name: x}}) for name in WHOLE["one"] for x in FIGURES),
        *(json.dumps(WHOLE | {"costs": WHOLE["costs"] | {"one": x}}) for x in FIGURES),
        json.dumps(WHOLE | {"several": {}}),
        json.dumps(WHOLE | {"more": 1}),
        json.dumps(WHOLE)[:-1],
    ],
    ids=lambda text: text[:60],
)
def test_damaged_file(path: Path, text: str) -> None:
    """What is no benchmark counts for nothing, and is put right."""
    path.write_text(text, encoding="latin-1")
    assert read_benchmark(path) is None
    assert keep_benchmark(path, QUICK) == QUICK
    assert read_benchmark(path) == QUICK


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_file_that_can_not_be_read(path: Path, make: Callable[[Path], None]) -> None:
    """A model loads all the same, and waits for nobody who would write to a pipe."""
    make(path)
    assert read_benchmark(path) is None
    assert keep_benchmark(path, SLOW) == SLOW


def test_folder_that_is_not_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be kept, the log says what follows from it."""
    assert keep_benchmark(path / "benchmark.json", SLOW) == SLOW
    assert "the next start may decide otherwise" in caplog.text


def test_location(tmp_path: Path) -> None:
    """Other graphs, CUDA graphs or threads take other times; the order of sizes does not count."""
    device = torch.device("cpu")
    paths = [tmp_path / "one.pt2", tmp_path / "several.pt2"]
    found = [
        locate_benchmark(paths, (), 1, device),
        locate_benchmark(paths[::-1], (), 1, device),
        locate_benchmark(paths, (1, 8), 1, device),
        locate_benchmark(paths, (), 2, device),
    ]
    assert len(set(found)) == len(found)
    assert locate_benchmark(paths, (8, 1), 1, device) == found[2]
    assert {each.parent for each in found} == {tmp_path}
