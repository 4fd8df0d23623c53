"""What ``examples/README.md`` prints runs as printed, and gives what it says."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.examples.test_retrieval import COMMANDS as SEARCH
from tests.server import Live, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
PICTURES = [(EXAMPLES / name).read_bytes() for name in ("digit.png", "digit-0.png")]
SERVE = "make serve"  # the fixture's server stands in for it
SHELL = "bash examples/extract.sh"
PYTHON = ".venv/bin/python examples/extract.py"
DRAW = ".venv/bin/python examples/pictures.py"
COMMANDS = (SHELL, PYTHON, *SEARCH, DRAW)
EMBEDDING = {"layers": "pool", "pool": "flatten", "normalize": "true", "format": "npy"}
NO_SERVER = "http://127.0.0.1:1"
LIMIT_S = 240

Array = NDArray[Any]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Folder:
    """A copy of the examples, with a Python where the README has it, and a server to talk to."""

    path: Path
    live: Live

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as it is printed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
        env = {**kept, "LAYERTAP_URL": self.live.url}
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=env,
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    path = tmp_path_factory.mktemp("project")
    shutil.copytree(EXAMPLES, path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    python = path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
            patch.delenv(name)
        with serving() as live:
            yield Folder(path, live)


@pytest.fixture(scope="module")
def runs(folder: Folder) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each of the README's commands, run once in the README's order."""
    return {command: folder.run(command) for command in (SHELL, PYTHON, DRAW)}


def output(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stderr
    return run.stdout


def embedded(live: Live, *pictures: bytes) -> Array:
    """The vectors by a request of the test's own."""
    reply = live.client.post("/extract", params=EMBEDDING, files=[("images", ("x", each)) for each in pictures])
    vectors: Array = np.load(io.BytesIO(reply.raise_for_status().content))
    return vectors


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def test_every_printed_command_is_run() -> None:
    """The README's shell blocks hold just the commands that are run, here and in ``test_retrieval``, in this order."""
    assert [line for block in blocks("sh") for line in block.splitlines()] == [SERVE, *COMMANDS]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_shell(folder: Folder, runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """The three forms by curl give what a request of one's own gives."""
    replies = [json.loads(line) for line in output(runs[SHELL]).splitlines() if line.startswith("{")]
    raw, multipart, base64 = (reply["features"] for reply in replies)
    assert np.argmax(raw["head"]["data"]) == 2
    assert raw["block1"]["shape"] == [1, 16]
    assert np.argmax(multipart["head"]["data"], axis=1).tolist() == [2, 0]
    assert multipart["few"]["shape"] == [2, 4]
    vector = np.frombuffer(b64decode(base64["pool"]["data"]), "<f4").reshape(base64["pool"]["shape"])
    np.testing.assert_allclose(vector, embedded(folder.live, PICTURES[0]), rtol=1e-5, atol=1e-6)


def test_python(folder: Folder, runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """The script's vectors, layers, receipts and refusals are the server's."""
    text = output(runs[PYTHON])
    reply = folder.live.client.post("/extract", params={**EMBEDDING, "dry_run": "true"})
    assert f"embeddings, fingerprint {reply.headers['x-layertap-fingerprint']}\n" in text
    one, other = embedded(folder.live, *PICTURES)
    (cosine,) = re.findall(r"cosine of the two: (.*)", text)
    assert float(cosine) == pytest.approx(one @ other, abs=2e-4)
    for line in ("block2 +(2, 32, 16, 16)", "block2.conv1 +(2, 32)", "head:input +(2, 64)", "embedding +(2, 64)"):
        name, shape = line.split(" +")
        assert re.search(f"^  {re.escape(name)} +{re.escape(shape)}$", text, re.MULTILINE)
    assert "captured [2, 64, 8, 8], pool none" in text
    assert "422 Unprocessable Content: there is no layer 'blok3'\n  did you mean 'block3'" in text
    assert "1 row; input 1: " in text


def test_readme_shows_the_refusal_as_it_is(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """The refusal that the README shows is what the script prints."""
    (shown,) = blocks("")
    assert shown in output(runs[PYTHON])


def test_pictures_are_drawn_again(folder: Folder, runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """The script that draws the pictures gives the pixels of those that are kept."""
    assert output(runs[DRAW]).splitlines() == ["digit.png: a 2", "digit-0.png: a 0"]
    for name, kept in zip(("digit.png", "digit-0.png"), PICTURES, strict=True):
        with Image.open(folder.path / "examples" / name) as drawn:
            assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(io.BytesIO(kept))))


def test_no_server(folder: Folder) -> None:
    """``--url`` outranks the environment, and without a server a script says in one line how to start one."""
    run = folder.run(f"{PYTHON} --url {NO_SERVER}")
    assert run.returncode == 1
    assert run.stderr == "no layertap answers there: start one with `make serve`, or name it with --url\n"
