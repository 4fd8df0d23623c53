"""Jobs that are killed, and gone on with: in the end they have what one uninterrupted run gives, bit for bit."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.service.bulk.conftest import read, start, write_pictures
from tests.service.cli.commands import Command
from tests.service.gated_server import wait_until
from tests.service.server_process import descendants

WORDS = ("--layers", "pool", "--pool", "mean")
COUNT = 2500
MANY, FEW = 8000, 1000
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


@pytest.mark.slow
def test_killed(command: Command, tmp_path: Path) -> None:
    """Killed twice, a job refuses other inputs and layers, and gives the file of one run, each broken picture named."""
    source, whole, killed = tmp_path / "source", tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    write_pictures(source, COUNT)
    bad = [f"{number:05}.jpg" for number in range(0, COUNT, 300)]
    for name in bad:
        (source / name).write_bytes(b"\xff\xd8\xff" + bytes(50))
    words, moments = ("bulk", source, *WORDS, "--out"), random.Random(0)
    for _ in range(2):
        assert kill_between(start(*words, killed), tmp_path / "killed.parquet.parts", moments)
        assert not killed.exists()
    (source / "00000-first.jpg").write_bytes((source / "00003.jpg").read_bytes())
    done = command(*words, killed)
    assert done.status == 2
    assert "other inputs than before" in done.notes
    assert "--restart" in done.notes
    (source / "00000-first.jpg").unlink()
    done = command("bulk", source, "--layers", "block3", "--pool", "mean", "--out", killed)
    assert done.status == 2
    assert "layers ['pool']" in done.notes
    status, output = finish(*words, killed)
    assert status == 0, output
    assert "rows are there already" in output
    status, output = finish(*words, whole)
    assert status == 0, output
    assert killed.read_bytes() == whole.read_bytes()
    rows = read(whole)
    assert len(set(rows["key"])) == COUNT
    assert [key for key, error in zip(rows["key"], rows["error"], strict=True) if error] == bad
    assert all(len(vector) == 64 for vector, error in zip(rows["pool"], rows["error"], strict=True) if not error)


@pytest.mark.slow
def test_killed_with_workers(tmp_path: Path) -> None:
    """Worker processes end with a job that is killed, and give the bits that threads give."""
    write_pictures(tmp_path / "source", 1500)
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


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """A job of many pictures takes no more memory than one of few."""
    source, few = tmp_path / "source", tmp_path / "few.txt"
    write_pictures(source, MANY)
    few.write_text("".join(f"{path}\n" for path in sorted(source.glob("*.jpg"))[:FEW]))
    peaks = [measure_peak("bulk", each, *WORDS, "--out", tmp_path / f"{each.stem}.parquet") for each in (source, few)]
    assert peaks[0] < peaks[1] + KEPT_ROWS_BYTES


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
def test_one_process_at_a_time(command: Command, tmp_path: Path) -> None:
    """Two processes never write to the same place."""
    source, folder = tmp_path / "source", tmp_path / "out"
    write_pictures(source, 1000)
    process = start("bulk", source, *WORDS, "--out", folder)
    while not (folder / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    done = command("bulk", source, *WORDS, "--out", folder)
    assert done.status == 2
    assert "another process writes" in done.notes
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
