"""Where results go: files, stdout, windows; in which format; what is refused."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from PIL import Image

from tests.service.cli.commands import Command


def test_stdout(command: Command, pictures: list[Path]) -> None:
    """Without ``--out`` a format goes to stdout, which holds nothing else; notes are on stderr."""
    with TextIOWrapper(BytesIO()) as stream, redirect_stdout(stream):
        done = command("extract", pictures[0], "--layers", "head", "--format", "png")
        assert stream.buffer.read1() == b""  # type: ignore[attr-defined]
        stream.buffer.seek(0)
        with Image.open(stream.buffer) as drawn:
            assert drawn.format == "PNG"
    assert (done.status, "stdout: fingerprint" in done.notes) == (0, True)


def test_json_on_stdout(command: Command, pictures: list[Path]) -> None:
    """Without a format what goes to stdout is JSON."""
    done = command("extract", pictures[0], "--layers", "head", "--out", "-")
    assert done.status == 0
    assert json.loads(done.out)["features"]["head"]["shape"] == [1, 10]


def test_a_terminal(command: Command, pictures: list[Path]) -> None:
    """What is no text is not written to a terminal: one line says what to do."""
    ours, theirs = os.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal, redirect_stdout(terminal):
        done = command("extract", pictures[0], "--layers", "head", "--format", "npz")
    told = "layertap: npz is no text for a terminal (give --out FILE, or use a pipe)\n"
    assert (done.status, done.notes) == (2, told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("extract", "--layers", "head", "--format", "gif"), "no format 'gif' (use one of json, npy, npz"),
        (("extract", "--layers", "head", "--out", "x.gif"), "use --format, or a name that ends in .json, .npy"),
        (("explain", "--method", "saliency", "--out", "x"), "can't tell the format of x"),
        (("show", "head", "--out", "x.json"), "json is no picture"),
        (("extract",), "Missing option '--layers' (see layertap extract --help)"),
        (("extract", "--layrs", "head"), "No such option: --layrs"),
        (("extrct",), "'extract'"),
        (("extract", "--layers", "block4"), "did you mean 'block"),
        (("extract", "--layers", "head", "--pool", "average"), "'mean_all'"),
        (("extract", "--layers", "head", "--out", "nowhere/x.npz"), "nowhere/x.npz"),
        (("extract", "--layers", "block1,head", "--out", "x.npy"), "npz"),
        (("extract", "--layers", "head", "--config", "nowhere.yaml"), "can't read nowhere.yaml"),
        (("explain", "--method", "gradcam", "--out", "x.npz"), "(did you mean 'grad_cam'?)"),
        (("explain", "--method", "smoothgrad", "--samples", "0", "--out", "x.npz"), "--samples: "),
        (("explain", "--method", "rollout", "--out", "x.npz"), "attention_rollout"),
        (("explain", "--method", "saliency", "--classes", "1,1", "--out", "x.npz"), "each once"),
        (("explain", "--method", "saliency", "--classes", "77", "--out", "x.npz"), "class 77 is out of range"),
    ],
)
def test_refused(
    command: Command,
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    told: str,
) -> None:
    """A mistake in a command's words is one line on stderr and status 2; no file is begun."""
    monkeypatch.chdir(tmp_path)
    done = command(words[0], pictures[0], *words[1:])
    assert (done.status, done.out, len(done.notes.splitlines())) == (2, "", 1)
    assert done.notes.startswith("layertap: ")
    assert told in done.notes
    assert not list(tmp_path.glob("x*"))
