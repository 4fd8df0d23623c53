"""``extract``: the same answers as over HTTP, and mistakes in one line each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import Command


@pytest.mark.parametrize(("form", "remote"), [("json", False), ("npy", False), ("npz", True)])
def test_extract(command: Command, live: Live, pictures: list[Path], tmp_path: Path, form: str, remote: bool) -> None:
    """``extract`` writes the very bytes that a server answers with, receipts with probes among them."""
    names = "block3" if form == "npy" else "block3,block2.relu#*,head:input"
    file = tmp_path / f"out.{form}"
    options = ("--layers", names, "--pool", "mean", "--normalize", "--out", file, *(("--url", live.url) * remote))
    done = command("extract", *pictures, *options)
    assert (done.status, done.out) == (0, "")
    parts = [("images", file.read_bytes()) for file in pictures]
    query = {"layers": names, "pool": "mean", "normalize": "true", "format": form, "isolated": "true", "probe": "true"}
    reply = live.client.post("/extract", files=parts, params=query)
    assert reply.status_code == 200
    assert file.read_bytes() == reply.content
    assert reply.headers["x-layertap-fingerprint"] in done.notes


def test_more_than_a_request_has(
    command: Command, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pictures than a request may have, or the queue holds, are for ``bulk``."""
    monkeypatch.setenv("LAYERTAP_MAX_INPUTS", "2")
    done = command("extract", *pictures, "--layers", "head", "--out", tmp_path / "a.json")
    assert (done.status, len(done.notes.splitlines())) == (2, 1)
    assert "layertap bulk" in done.notes
    assert not (tmp_path / "a.json").exists()


def test_summary(command: Command, pictures: list[Path]) -> None:
    """Without a file ``extract`` prints what it found."""
    done = command("extract", pictures[0], "--layers", "block1,head")
    assert done.status == 0
    assert "(1, 16, 32, 32)" in done.out


def test_broken_files(command: Command, pictures: list[Path], broken: Path, tmp_path: Path) -> None:
    """Each picture that can't be decoded is named in a line, and nothing is written; a pipe is not waited for."""
    os.mkfifo(tmp_path / "no.png")
    done = command("extract", *pictures, tmp_path / "no.png", "--layers", "head")
    assert (done.status, done.notes) == (2, f"layertap: {tmp_path / 'no.png'}: is no regular file\n")
    file = tmp_path / "out.npz"
    done = command("extract", pictures[0], broken, pictures[1], broken, "--layers", "head", "--out", file)
    assert (done.status, done.out) == (2, "")
    lines = done.notes.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"layertap: {broken}: ") for line in lines)
    assert not file.exists()


def test_show(command: Command, live: Live, pictures: list[Path], tmp_path: Path) -> None:
    """The picture is the one that the server draws, and its place is printed."""
    file = tmp_path / "out.png"
    done = command("show", pictures[0], "block1,head", "--tiles", "4", "--out", file)
    assert (done.status, done.out) == (0, f"{file}\n")
    query = {"layers": "block1,head", "tiles": "4", "format": "png"}
    reply = live.client.post("/extract", files=[("images", pictures[0].read_bytes())], params=query)
    assert reply.status_code == 200
    assert file.read_bytes() == reply.content


def test_without_a_screen(command: Command, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody would see a window, it says where the picture is."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    done = command("show", pictures[0], "block1")
    assert done.status == 0
    assert Path(done.out.strip()).read_bytes().startswith(b"\x89PNG")
