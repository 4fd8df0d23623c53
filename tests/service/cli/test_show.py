"""``show``: the picture that a server draws, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import Command


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
