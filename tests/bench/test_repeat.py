"""Runs that the host disturbed are taken again, and the results tell of all."""

from __future__ import annotations

import pytest

from bench.serving.repeat import repeat_disturbed
from bench.serving.report import summary

FIGURES = {"per_s": 90.0, "p50_ms": 8.0}


@pytest.mark.parametrize(
    ("steals", "runs", "kept"),
    [((0.1,), 1, 0), ((0.3, 0.02, 0.0), 2, 1), ((0.3, 0.2, 0.25, 0.0), 3, 1)],
)
def test_disturbed_runs_are_repeated(steals: tuple[float, ...], runs: int, kept: int) -> None:
    """Until the host left enough of the cores, and no more than twice; the least disturbed one is kept and marked."""
    left = iter([{**FIGURES, "per_s": float(number), "steal": steal} for number, steal in enumerate(steals)])
    found = repeat_disturbed(lambda: next(left))
    assert (found["per_s"], found["steal"]) == (kept, steals[kept])
    assert [run["kept"] for run in found["runs"]] == [number == kept for number in range(runs)]
    assert [run["steal"] for run in found["runs"]] == list(steals[:runs])


def test_all_runs_are_in_the_results() -> None:
    """As they were, by round, beside the medians of what is a number."""
    runs = [{"per_s": 90.0, "steal": 0.02, "kept": True}]
    figures = {**FIGURES, "runs": runs, "forwards": {"1": 3, "2": 4}}
    told = summary([{"small": {"server 1": figures}}])["small"]["server 1"]
    assert told["rounds"] == [figures]
    assert set(told["figures"]) == set(FIGURES)
