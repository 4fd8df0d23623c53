"""``bench.alone``: what is made of its figures, and that both servers give the same answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.alone import KINDS, summarize

ROOT = Path(__file__).parents[2]


def test_what_is_beyond() -> None:
    """Medians of what requests take beyond decoding and forward, request by request; a text may have no decoding."""
    ours = [{"whole": 10.0, "decode": 2.0, "forward": 4.0}, {"whole": 30.0, "decode": 20.0, "forward": 7.0}]
    bare = [{"whole": 5.0, "forward": 4.0}, {"whole": 7.0, "forward": 6.0}]
    found = summarize({"ours": ours, "bare": bare})
    assert found["ours"] == {"whole_ms": 20.0, "work_ms": 16.5, "beyond_ms": 3.5}
    assert found["bare"] == {"whole_ms": 6.0, "work_ms": 5.0, "beyond_ms": 1.0}
    assert found["ratio"] == {"whole": 20 / 6, "beyond": 3.5}


@pytest.mark.slow
def test_same_answers(tmp_path: Path) -> None:
    """A round of each kind against both servers; it ends without figures where their answers differ."""
    out = tmp_path / "alone.json"
    command = [sys.executable, "-m", "bench.alone", "--rounds", "1", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=280)
    results = json.loads(out.read_text())["results"]
    assert list(results) == list(KINDS)
    assert all(result["ratio"]["beyond"] > 0 for result in results.values())
