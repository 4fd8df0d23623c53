"""``--url``: what a server refuses is what this process refuses, in the same words and exit status."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import configured, net

KEY = "secret"
NETS = (net("touchy", "Touchy"), net("never", "Never", required=False, load="lazy"))


@pytest.fixture(scope="module")
def locked(serve: Serve) -> Iterator[Live]:
    """A server that asks for a key and takes three inputs at once."""
    with serve(configured(*NETS), api_keys=(KEY,), max_inputs=3) as live:
        yield live


@pytest.fixture
def url(locked: Live, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address, with the key in the environment."""
    monkeypatch.setenv("LAYERTAP_API_KEY", KEY)
    return locked.url


REFUSED = (
    ("extract", "PICTURE", "--layers", "block4"),
    ("show", "PICTURE", "blok"),
    ("explain", "PICTURE", "--method", "lime"),
    ("layers", "digit"),
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refused(command: Command, url: str, pictures: list[Path], words: tuple[str, ...]) -> None:
    """A mistake is told in the same words; of a server its address stands before them."""
    given = [pictures[0] if word == "PICTURE" else word for word in words]
    here, there = command(*given), command(*given, "--url", url)
    assert (here.status, there.status, here.out, there.out) == (2, 2, "", "")
    assert here.notes == there.notes.replace(f"{url}: ", "")
    assert len(there.notes.splitlines()) == 1


EXTRACT = ("extract", "PICTURE", "--layers", "head")
COMMANDS = (
    EXTRACT,
    ("show", "PICTURE", "head"),
    ("explain", "PICTURE", "--method", "saliency"),
    ("layers", "digits"),
    ("check",),
)


@pytest.mark.parametrize(
    ("words", "where", "told"),
    [
        *((words, ("URL",), "LAYERTAP_API_KEY") for words in COMMANDS),
        (EXTRACT, ("http://127.0.0.1:1",), "no server answers at http://127.0.0.1:1"),
        (EXTRACT, ("URL/v1",), "without /v1"),
        (EXTRACT, ("URL", "--config", "m.yaml"), "--url and --config cannot be combined"),
    ],
)
def test_no_such_server(
    command: Command, locked: Live, pictures: list[Path], words: tuple[str, ...], where: tuple[str, ...], told: str
) -> None:
    """Where the key is missing, nobody answers, or a configuration is named too, it is one line."""
    given = [pictures[0] if word == "PICTURE" else word for word in words]
    done = command(*given, "--url", *(each.replace("URL", locked.url) for each in where))
    assert (done.status, done.out, len(done.notes.splitlines())) == (2, "", 1)
    assert told in done.notes


def test_no_folder_for_temporary_files(url: str, pictures: list[Path]) -> None:
    """Where no folder for temporary files can be written to, the one line says what to set."""
    words = [sys.executable, "-m", "layertap", "show", str(pictures[0]), "block1", "--url", url]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))  # a full disk, to whoever writes
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "set TMPDIR" in done.stderr
