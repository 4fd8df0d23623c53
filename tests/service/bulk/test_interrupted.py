"""Jobs that are killed, and gone on with: in the end they have what one uninterrupted run gives, bit for bit."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.service.bulk.conftest import read, start, write_pictures
from tests.service.cli.commands import Command
from tests.service.gated_server import wait_until
from tests.service.server_process import descendants

WORDS = ("--layers", "pool", "--pool", "mean")
MANY, BAD, KILLS = 10_000, 200, 3
FEW = MANY // 5
KEPT_ROWS_BYTES = (MANY - FEW) * 3 * 32 * 32 * 4  # what a job of many had more, if it kept what goes into the model
LIMIT_S = 240


def finish(*words: str | Path) -> tuple[int, str]:
    """The status of a process, and what it prints."""
    process = start(*words)
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output.decode()


def kill_between(process: subprocess.Popen[bytes], folder: Path, moments: random.Random) -> bool:
    """Kill a process at some moment after it has written one more part; whether it was still at work."""
    before = len(list(folder.glob("part-*")))
    while process.poll() is None:
        if len(list(folder.glob("part-*"))) > before:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0, 0.2))
            break
        time.sleep(0.005)
    running = process.poll() is None
    process.kill()
    process.communicate()
    return running


def test_killed_once(tmp_path: Path) -> None:
    """A job that is killed goes on after what it has written, and gives the same file."""
    write_pictures(tmp_path / "source", 2500)
    whole, killed = tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    words = ("bulk", tmp_path / "source", *WORDS, "--out")
    assert kill_between(start(*words, killed), tmp_path / "killed.parquet.parts", random.Random(0))
    assert not killed.exists()
    status, output = finish(*words, killed)
    assert status == 0, output
    assert "rows are there already" in output
    status, output = finish(*words, whole)
    assert status == 0, output
    assert killed.read_bytes() == whole.read_bytes()
    assert len(read(whole)["key"]) == 2500


@pytest.mark.slow
def test_killed_with_workers(tmp_path: Path) -> None:
    """Worker processes end with a job that is killed, and give the bits that threads give."""
    write_pictures(tmp_path / "source", 2500)
    killed, whole = tmp_path / "killed.parquet", tmp_path / "whole.parquet"
    words, workers = ("bulk", tmp_path / "source", *WORDS, "--out"), {"LAYERTAP_WORKERS": "2"}
    process = start(*words, killed, **workers)
    while not list((tmp_path / "killed.parquet.parts").glob("part-*.parquet")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    started = descendants(process.pid)
    assert len(started) >= 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in started))
    assert not killed.exists()
    for out, environment in ((killed, workers), (whole, {})):
        done = start(*words, out, **environment)
        output, _ = done.communicate(timeout=LIMIT_S)
        assert done.returncode == 0, output.decode()
    assert killed.read_bytes() == whole.read_bytes()


def write_many(folder: Path, bad: list[int]) -> None:
    """Very small pictures, and files that are none."""
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (MANY, 12, 12, 3), dtype=np.uint8)
    for number in range(MANY):
        path = folder / f"{number:05}.png"
        if number in bad:
            path.write_bytes(b"" if number % 2 else b"\x89PNG\r\n\x1a\n" + bytes(50))
        else:
            Image.fromarray(noise[number]).save(path)


@pytest.mark.slow
def test_killed_often(tmp_path: Path) -> None:
    """10,000 pictures, 200 broken, three kills at random: equal to one run, each broken one named, memory flat."""
    moments = random.Random(1)
    bad = sorted(moments.sample(range(MANY), BAD))
    write_many(tmp_path / "source", bad)
    whole, killed = tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    words = ("bulk", tmp_path / "source", *WORDS, "--out")
    kills = sum(kill_between(start(*words, killed), tmp_path / "killed.parquet.parts", moments) for _ in range(KILLS))
    assert kills == KILLS
    status, output = finish(*words, killed)
    assert status == 0, output
    peak = measure_peak(*words, whole)
    assert killed.read_bytes() == whole.read_bytes()
    rows = read(whole)
    assert rows["key"] == [f"{number:05}.png" for number in range(MANY)]
    assert [number for number, error in enumerate(rows["error"]) if error] == bad
    assert all(len(vector) == 64 for vector, error in zip(rows["pool"], rows["error"], strict=True) if not error)
    few = tmp_path / "few.txt"
    few.write_text("".join(f"{tmp_path}/source/{number:05}.png\n" for number in range(FEW)))
    assert peak < measure_peak("bulk", few, *WORDS, "--out", tmp_path / "few.parquet") + KEPT_ROWS_BYTES


def measure_peak(*words: str | Path) -> int:
    """The most bytes of its own that a process has in memory, which ends with pictures left out.

    Pages of libraries are left out: how many of them are there differs by 100 MiB from run to run.
    """
    process = start(*words, MALLOC_ARENA_MAX="2")  # how many threads meet in malloc is chance
    peak = 0
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.01)
    output, _ = process.communicate()
    assert process.returncode == 0, output.decode()
    return peak


@pytest.mark.slow
def test_other_pictures_are_refused(command: Command, tmp_path: Path) -> None:
    """A job whose source has changed is not gone on with: rows would be lost or doubled."""
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    write_pictures(source, 5000)
    assert kill_between(start("bulk", source, *WORDS, "--out", out), tmp_path / "out.parquet.parts", random.Random(2))
    (source / "00000-first.jpg").write_bytes((source / "00000.jpg").read_bytes())
    done = command("bulk", source, *WORDS, "--out", out)
    assert done.status == 2
    assert "other inputs than before" in done.notes
    assert "--restart" in done.notes
    done = command("bulk", source, "--layers", "block3", "--pool", "mean", "--out", out)
    assert done.status == 2
    assert "layers ['pool']" in done.notes
    (source / "00000-first.jpg").unlink()
    assert command("bulk", source, *WORDS, "--out", out).status == 0
    assert len(set(read(out)["key"])) == 5000


@pytest.mark.slow
def test_one_process_at_a_time(command: Command, tmp_path: Path) -> None:
    """Two processes never write to the same place."""
    source, folder = tmp_path / "source", tmp_path / "out"
    write_pictures(source, 3000)
    process = start("bulk", source, *WORDS, "--out", folder)
    while not (folder / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    done = command("bulk", source, *WORDS, "--out", folder)
    assert done.status == 2
    assert "another process writes" in done.notes
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
