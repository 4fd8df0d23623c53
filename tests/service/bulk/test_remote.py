"""Jobs that a server answers: the vectors that this process gives, bad pictures named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.server import Live
from tests.service.bulk.conftest import read, write_pictures
from tests.service.cli.commands import Command
from tests.service.conftest import Serve

WORDS = ("--layers", "block2,pool", "--pool", "mean", "--normalize")


def test_by_a_server(command: Command, live: Live, tmp_path: Path) -> None:
    """Rows, reasons and fingerprints are those of a job in this process; vectors are equal within rounding."""
    source, outs = tmp_path / "source", (tmp_path / "here.parquet", tmp_path / "there.parquet")
    write_pictures(source, 70)
    (source / "00000.jpg").write_bytes(b"broken")
    (source / "00003.jpg").write_bytes(b"")
    assert command("bulk", source, *WORDS, "--out", outs[0]).status == 1
    assert command("bulk", source, *WORDS, "--out", outs[1], "--url", live.url).status == 1
    here, there = (read(out) for out in outs)
    for name in ("key", "digest", "fingerprint", "error"):
        assert here[name] == there[name]
    for name in ("block2", "pool"):
        good = [(one, other) for one, other in zip(here[name], there[name], strict=True) if one is not None]
        assert len(good) == 68
        np.testing.assert_allclose(*zip(*good, strict=True), atol=1e-5)


def test_within_a_servers_limits(command: Command, serve: Serve, tmp_path: Path) -> None:
    """A server that takes few inputs, small bodies and little to reply is asked for so much at a time."""
    write_pictures(tmp_path / "source", 20)
    out = tmp_path / "out.parquet"
    with serve(max_inputs=5, max_queue_rows=7, max_body_bytes=80_000, max_reply_bytes=3000) as live:
        assert command("bulk", tmp_path / "source", *WORDS, "--out", out, "--url", live.url).status == 0
    assert read(out)["error"] == [None] * 20


def test_a_key(command: Command, serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is that of the environment; without it the job ends with what the server says.

    Without a server it is refused, as a mistyped setting.
    """
    words = ("bulk", folder / "*.jpg", *WORDS, "--out", tmp_path / "out.parquet", "--url")
    with serve(api_keys=("secret",)) as live:
        done = command(*words, live.url)
        assert (done.status, "key" in done.notes) == (2, True)
        monkeypatch.setenv("LAYERTAP_API_KEY", "secret")
        assert command(*words, live.url).status == 0
        done = command("bulk", folder / "*.jpg", *WORDS, "--out", tmp_path / "other.parquet")
        assert (done.status, "LAYERTAP_API_KEY: there is no such setting" in done.notes) == (2, True)


def test_addresses_and_keys_that_cannot_be(
    command: Command, live: Live, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that OpenAI's clients take, and a key that no header can hold, are told in words; no key is shown."""
    words = ("bulk", folder, "--out", tmp_path / "out.parquet", "--url")
    done = command(*words, f"{live.url}/v1")
    assert (done.status, "without /v1" in " ".join(done.notes.split())) == (2, True)
    for key in ("schlüssel", "one\ntwo"):
        monkeypatch.setenv("LAYERTAP_API_KEY", key)
        done = command(*words, live.url)
        assert (done.status, "LAYERTAP_API_KEY" in done.notes, key in done.notes) == (2, True, False)
