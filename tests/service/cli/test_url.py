"""``--url``: what a server refuses is what this process refuses, in the same words and exit status."""

from __future__ import annotations

from collections.abc import Iterator
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


COMMANDS = (
    ("extract", "PICTURE", "--layers", "head"),
    ("show", "PICTURE", "head"),
    ("explain", "PICTURE", "--method", "saliency"),
    ("layers", "digits"),
    ("check",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_key(command: Command, locked: Live, pictures: list[Path], words: tuple[str, ...]) -> None:
    """Where the key is missing it is one line that names the variable."""
    check_refused(command, pictures, words, (locked.url,), "LAYERTAP_API_KEY")


@pytest.mark.parametrize(
    ("where", "told"),
    [
        pytest.param(("http://127.0.0.1:1",), "no server answers at http://127.0.0.1:1", id="nobody"),
        pytest.param(("URL/v1",), "without /v1", id="of OpenAI"),
        pytest.param(("URL", "--config", "m.yaml"), "--url and --config cannot be combined", id="two"),
    ],
)
def test_no_such_server(
    command: Command, locked: Live, pictures: list[Path], where: tuple[str, ...], told: str
) -> None:
    """Where nobody answers, and where a configuration is named too, it is one line."""
    check_refused(command, pictures, COMMANDS[0], tuple(each.replace("URL", locked.url) for each in where), told)


def check_refused(
    command: Command, pictures: list[Path], words: tuple[str, ...], where: tuple[str, ...], told: str
) -> None:
    given = [pictures[0] if word == "PICTURE" else word for word in words]
    done = command(*given, "--url", *where)
    assert (done.status, done.out, len(done.notes.splitlines())) == (2, "", 1)
    assert told in done.notes
