"""``show``: the picture that a server draws, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.config.configuration import read_configuration
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve


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


VIT = """
models:
  - name: vit
    source: timm:vit_tiny_patch16_224
    weights: random:0
    device: cpu
    args: {img_size: 32, patch_size: 8, depth: 2, embed_dim: 24, num_heads: 3}
"""


def test_heads_over_the_picture(command: Command, serve: Serve, pictures: list[Path], tmp_path: Path) -> None:
    """Heads of attention lie over the picture, as the server draws them."""
    config, file = tmp_path / "models.yaml", tmp_path / "out.png"
    config.write_text(VIT)
    done = command("show", pictures[0], "blocks.1.attn:attention", "--config", config, "--out", file)
    assert (done.status, done.notes.count("fingerprint")) == (0, 1)
    with serve(read_configuration(config)) as live:
        query = {"layers": "blocks.1.attn:attention", "format": "png"}
        reply = live.client.post("/extract", files=[("images", pictures[0].read_bytes())], params=query)
    assert file.read_bytes() == reply.content
