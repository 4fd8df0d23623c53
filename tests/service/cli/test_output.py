"""Where results go: files, stdout, windows; in which format; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import ROOT, Command
from tests.service.cli.terminal import run_in_terminal, strip_escapes

LIMIT_S = 240


def run_piped(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A command in a process of its own, with pipes in place of a terminal."""
    command = [sys.executable, "-m", "layertap", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False)


def test_format(command: Command, live: Live, pictures: list[Path], tmp_path: Path) -> None:
    """``--format`` says what is written whatever the file is called, the same as the server draws."""
    file = tmp_path / "drawn"
    assert command("extract", pictures[0], "--layers", "block1", "--format", "png", "--out", file).status == 0
    query = {"layers": "block1", "format": "png"}
    reply = live.client.post("/extract", files=[("images", pictures[0].read_bytes())], params=query)
    assert file.read_bytes() == reply.content


def test_stdout(pictures: list[Path]) -> None:
    """Without ``--out`` a format goes to stdout, which holds nothing else; notes are on stderr."""
    drawn = run_piped("extract", pictures[0], "--layers", "head", "--format", "png")
    assert (drawn.returncode, drawn.stdout[:4]) == (0, b"\x89PNG")
    assert b"stdout: fingerprint" in drawn.stderr


def test_json_on_stdout(command: Command, pictures: list[Path]) -> None:
    """Without a format what goes to stdout is JSON."""
    done = command("extract", pictures[0], "--layers", "head", "--out", "-")
    assert done.status == 0
    assert json.loads(done.out)["features"]["head"]["shape"] == [1, 10]


def test_a_terminal(pictures: list[Path]) -> None:
    """What is no text is not written to a terminal: one line says what to do."""
    status, text = run_in_terminal("extract", pictures[0], "--layers", "head", "--format", "npz")
    assert (status, strip_escapes(text)) == (
        2,
        "layertap: npz is no text for a terminal (give --out FILE, or use a pipe)\n",
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("extract", "--layers", "head", "--format", "gif"), "no format 'gif' (use one of json, npy, npz"),
        (("extract", "--layers", "head", "--out", "x.gif"), "use --format, or a name that ends in .json, .npy"),
        (("explain", "--method", "saliency", "--out", "x"), "can't tell the format of x"),
        (("show", "head", "--out", "x.json"), "json is no picture"),
        (("show", "head", "--format", "npz"), "'npz' is not one of 'png', 'webp'"),
        (("extract",), "Missing option '--layers' (see layertap extract --help)"),
        (("extract", "--layers"), "'--layers' requires an argument"),
        (("extract", "--layrs", "head"), "No such option: --layrs"),
        (("show", "head", "--tiles", "many"), "--tiles"),
    ],
)
def test_refused(command: Command, pictures: list[Path], words: tuple[str, ...], told: str) -> None:
    """A mistake in a command's words is one line on stderr and status 2."""
    done = command(words[0], pictures[0], *words[1:])
    assert (done.status, done.out, len(done.notes.splitlines())) == (2, "", 1)
    assert done.notes.startswith("layertap: ")
    assert told in done.notes


def test_no_such_command(command: Command) -> None:
    """A command that there is not is one line that names the nearest, too."""
    done = command("extrct")
    assert (done.status, len(done.notes.splitlines())) == (2, 1)
    assert "'extract'" in done.notes
