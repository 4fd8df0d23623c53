"""``bench.profile``: what threads of a real server used, by what they are for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bench.profile.__main__ import table
from bench.profile.threads import LOOP, THREADS, samples, used
from bench.serving.client import Ask, Connection
from bench.serving.contenders import extract
from bench.serving.pictures import written
from bench.serving.server import serving

REQUESTS = 30


@pytest.mark.slow
def test_each_role_is_seen(tmp_path: Path) -> None:
    asks = [
        Ask(extract("mobilenet_v3_small", ["avgpool"], "flatten", "npy"), path.read_bytes())
        for path in written(tmp_path)
    ]
    with serving(["mobilenet_v3_small"], tmp_path, THREADS) as server, closing(Connection(server.port)) as line:
        before, known = used(server), samples(server)
        for number in range(REQUESTS):
            line.post(asks[number % len(asks)])
        gained, told = used(server) - before, samples(server)
    assert {LOOP, "decoding", "forwards"} <= set(gained)
    steps = ("layertap_step_seconds_count", "encode")
    assert told[steps] - known.get(steps, 0.0) == REQUESTS


def test_table() -> None:
    figures = {
        "per_s": 100.0,
        "rows": 8,
        "cpu": {"forwards": 8.0, "decoding": 6.5, LOOP: 2.0},
        "alone": {"forwards": 7.0, "decoding": 6.0},
        "beyond": 3.5,
    }
    shown = table("embedding", figures)
    cells = [list(column.cells) for column in shown.columns]
    lines = {name: rest for name, *rest in zip(*cells, strict=True)}
    assert lines["all"] == ["16.50", "13.00", "3.50"]
    assert lines[LOOP] == ["2.00", "", "2.00"]
    assert lines["decoding"] == ["6.50", "6.00", "0.50"]
