"""``layertap bulk --reduce``: what numpy makes of all activations that plain hooks take, killed or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from layertap.models.digits import spec
from layertap.service.bulk import bulk, parts, pipeline
from layertap.service.bulk.bulk import RESULTS
from layertap.service.bulk.manifest import replace_file
from tests.loading import load_model
from tests.marks import slow
from tests.oracle import record
from tests.server import Live
from tests.service.bulk.conftest import read
from tests.service.bulk.test_interrupted import KilledError
from tests.service.cli.commands import Command
from tests.service.support import Array

COUNT, TOP = 50, 5
LAYERS = ("block2", "block3.relu#0", "head")
WORDS = ("--layers", ",".join(LAYERS), "--reduce", "stats,top,histogram,covariance", "--top", str(TOP))


def write_source(folder: Path, count: int, *, broken: bool = False) -> Array:
    """Pictures of noise as large as the model takes, and their pixels; between them a file that is none."""
    folder.mkdir()
    pixels = np.random.default_rng(7).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        Image.fromarray(each // 2 + number % 3 * 40).save(folder / f"{number:04}.png")
    if broken:
        (folder / "0003-broken.png").write_bytes(b"no picture")
    return np.stack([np.asarray(Image.open(folder / f"{number:04}.png")) for number in range(count)])


def take_by_hooks(pixels: Array) -> dict[str, Array]:
    """What plain hooks see of them: (inputs, channels, positions) in double precision."""
    rows = (torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    seen = record(load_model(spec()).module.eval(), rows)
    places = {name: (name.partition("#")[0], 0, (), "output") for name in LAYERS}
    return {name: seen[place].flatten(2).double().numpy() for name, place in places.items() if seen[place].ndim > 2} | {
        name: seen[place].unsqueeze(2).double().numpy() for name, place in places.items() if seen[place].ndim == 2
    }


def load(out: Path) -> dict[str, Any]:
    """The results of a job, by their names."""
    with np.load(out / RESULTS) as file:
        return dict(file)


def reduce_by_hand(values: Array, edges: Array) -> dict[str, Array]:
    """The same with numpy over all activations at once; of the strongest inputs the values alone."""
    by_channel = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
    pooled = values.mean(2)
    return {
        "count": np.full(len(by_channel), by_channel.shape[1]),
        "mean": by_channel.mean(1),
        "std": by_channel.std(1),
        "min": by_channel.min(1),
        "max": by_channel.max(1),
        "zeros": (by_channel == 0).mean(1),
        "top": -np.sort(-values.max(2), axis=0)[:TOP].T,
        "histogram": np.stack([np.histogram(each, edges.astype(np.float64))[0] for each in by_channel]),
        "covariance": np.cov(pooled.T, bias=True),
    }


def measure_cka(one: Array, other: Array) -> float:
    """Linear CKA by Gram matrices over inputs, as the paper has it."""
    centre = np.eye(len(one)) - 1 / len(one)
    k, m = (centre @ (each @ each.T) @ centre for each in (one.mean(2), other.mean(2)))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


@pytest.mark.parametrize("remote", [False, slow(True)])
def test_numbers(command: Command, live: Live, tmp_path: Path, remote: bool) -> None:
    """Each reduction is what numpy makes of all activations; an input without a result counts nowhere."""
    values = take_by_hooks(write_source(tmp_path / "source", COUNT, broken=True))
    out = tmp_path / "out"
    done = command("bulk", tmp_path / "source", *WORDS, "--out", out, *(("--url", live.url) if remote else ()))
    assert done.status == 0, done.notes
    assert f"{COUNT + 1} rows, 1 of them without a result" in done.notes
    found = load(out)
    for layer in LAYERS:
        for name, expected in reduce_by_hand(values[layer], found["histogram_edges"]).items():
            if name == "histogram":  # a value beside an edge may be rounded to its other side
                assert np.abs(found[f"{layer}.{name}"] - expected).sum() <= 4
            else:
                np.testing.assert_allclose(found[f"{layer}.{name}"], expected, rtol=1e-5, atol=1e-6)
        names = found[f"{layer}.top_names"]
        strongest = np.argsort(-values[layer].max(2), axis=0)[:TOP].T
        apart = -np.diff(-np.sort(-values[layer].max(2), axis=0)[: TOP + 1].T).max(1) > 1e-5
        assert apart.any()
        places = np.take_along_axis(
            values[layer].argmax(2).T, found[f"{layer}.top_inputs"] - (found[f"{layer}.top_inputs"] > 2), 1
        )
        assert found[f"{layer}.top_places"][apart].tolist() == places[apart].tolist()
        assert names[apart].tolist() == [[f"{number:04}.png" for number in row] for row in strongest[apart]]
    assert found["cka_layers"].tolist() == list(LAYERS)
    expected = np.array([[measure_cka(values[a], values[b]) for b in LAYERS] for a in LAYERS])
    np.testing.assert_allclose(found["cka"], expected, rtol=1e-4)
    (part,) = out.glob("part-*")
    assert [key for key, error in zip(read(part)["key"], read(part)["error"], strict=True) if error] == [
        "0003-broken.png"
    ]


def die_at_each_write(command: Command, words: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Enter a command again until it ends well: it dies at the fourth write. Returns how often it died."""
    deaths = 0
    while True:
        writes = iter(range(3))

        def replace_or_die(path: Path, writes: Iterator[int] = writes) -> AbstractContextManager[Path]:
            if next(writes, None) is None:
                raise KilledError
            return replace_file(path)

        with monkeypatch.context() as patch:
            for module in (bulk, parts):
                patch.setattr(module, "replace_file", replace_or_die)
            try:
                done = command(*words)
            except KilledError:
                deaths += 1
                continue
        assert done.status == 0, done.notes
        return deaths


@pytest.mark.slow
def test_killed_at_each_write(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a job dies, between a state and the table of its inputs too, the next one goes on to the same bits."""
    monkeypatch.setattr(pipeline, "PART_S", 0.0)
    monkeypatch.setattr("layertap.service.bulk.local.MAX_ROWS", 8)
    write_source(tmp_path / "source", 24, broken=True)
    words = ("bulk", tmp_path / "source", *WORDS, "--out")
    assert command(*words, tmp_path / "whole").status == 0
    deaths = die_at_each_write(command, (*words, tmp_path / "killed"), monkeypatch)
    assert deaths >= 3
    assert (tmp_path / "killed" / RESULTS).read_bytes() == (tmp_path / "whole" / RESULTS).read_bytes()
