"""``explain``: the same maps as over HTTP, the best classes named, mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import Command


@pytest.mark.parametrize("form", ["npz", "npy", "json"])
def test_explain(command: Command, live: Live, pictures: list[Path], tmp_path: Path, form: str) -> None:
    """``explain`` writes the very bytes that the server answers with."""
    methods, classes = ("saliency", "3") if form == "npy" else ("saliency,grad_cam", "top,3")
    file = tmp_path / f"out.{form}"
    done = command("explain", pictures[0], "--method", methods, "--classes", classes, "--out", file)
    assert (done.status, done.out) == (0, "")
    query = {"method": methods, "classes": classes, "format": form}
    files = [("images", pictures[0].read_bytes())]
    reply = live.client.post("/explain", files=files, params=query)
    assert reply.status_code == 200
    assert file.read_bytes() == reply.content
    assert reply.headers["x-layertap-fingerprint"] in done.notes
    assert done.notes.count("class ") == 5


def test_drawn(command: Command, live: Live, pictures: list[Path], tmp_path: Path) -> None:
    """A .png is the map over the picture, as the server draws it."""
    file = tmp_path / "out.png"
    assert command("explain", pictures[0], "--method", "saliency,integrated_gradients", "--out", file).status == 0
    query = {"method": "saliency,integrated_gradients", "format": "png"}
    reply = live.client.post("/explain", files=[("images", pictures[0].read_bytes())], params=query)
    assert file.read_bytes() == reply.content


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--method", "lime"), "the name of a method"),
        (("--method", "saliency", "--classes", "1,1"), "each once"),
        (("--method", "saliency", "--classes", "77"), "class 77 is out of range"),
        (("--method", "saliency", "--layer", "block1"), "'layer' is for Grad-CAM"),
    ],
)
def test_refused(command: Command, pictures: list[Path], tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    """Status 2 and one line that says why; nothing is written."""
    file = tmp_path / "out.npz"
    done = command("explain", pictures[0], *options, "--out", file)
    assert done.status == 2
    assert told in done.notes
    assert not file.exists()
