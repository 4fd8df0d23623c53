"""Jobs that a server answers: the vectors that this process gives, bad pictures named."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layertap.service.bulk import remote
from tests.client.misbehaving_server import MisbehavingServer, Received, cut, misbehaving, relay, reply
from tests.server import Live
from tests.service.bulk.conftest import COUNT, read, write_pictures
from tests.service.cli.commands import Command
from tests.service.conftest import Serve

WORDS = ("--layers", "block2,pool", "--pool", "mean", "--normalize")


def test_by_a_server(command: Command, live: Live, tmp_path: Path) -> None:
    """Rows, reasons and fingerprints are those of a job in this process; vectors are equal within rounding."""
    source, outs = tmp_path / "source", (tmp_path / "here.parquet", tmp_path / "there.parquet")
    write_pictures(source, 70)
    (source / "00000.jpg").write_bytes(b"broken")
    (source / "00003.jpg").write_bytes(b"")
    assert command("bulk", source, *WORDS, "--out", outs[0]).status == 0
    assert command("bulk", source, *WORDS, "--out", outs[1], "--url", live.url).status == 0
    here, there = (read(out) for out in outs)
    for name in ("key", "digest", "fingerprint", "error"):
        assert here[name] == there[name]
    for name in ("block2", "pool"):
        good = [(one, other) for one, other in zip(here[name], there[name], strict=True) if one is not None]
        assert len(good) == 68
        np.testing.assert_allclose(*zip(*good, strict=True), atol=1e-5)


def test_proxies(command: Command, live: Live, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment don't stand before this machine; one that can't be used is one line, and at once."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9")
    words = ("bulk", folder / "0000*.jpg", *WORDS, "--out", tmp_path / "out.parquet", "--url")
    done = command(*words, "http://layertap.example:8000")
    assert (done.status, len(done.notes.splitlines())) == (2, 1)
    assert "ALL_PROXY can't be used" in done.notes
    assert command(*words, live.url).status == 0


@pytest.mark.slow
def test_within_a_servers_limits(command: Command, serve: Serve, tmp_path: Path) -> None:
    """A server that takes few inputs, small bodies and little to reply is asked for so much at a time."""
    write_pictures(tmp_path / "source", 20)
    out = tmp_path / "out.parquet"
    with serve(max_inputs=5, max_queue_rows=7, max_body_bytes=80_000, max_reply_bytes=3000) as live:
        assert command("bulk", tmp_path / "source", *WORDS, "--out", out, "--url", live.url).status == 0
    assert read(out)["error"] == [None] * 20


def test_a_key(command: Command, serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is that of the environment; without it the job ends with what the server says."""
    words = ("bulk", folder / "*.jpg", *WORDS, "--out", tmp_path / "out.parquet", "--url")
    with serve(api_keys=("secret",)) as live:
        done = command(*words, live.url)
        assert (done.status, "key" in done.notes) == (2, True)
        monkeypatch.setenv("LAYERTAP_API_KEY", "secret")
        assert command(*words, live.url).status == 0
        assert command("check", "--url", live.url).status == 0


def test_a_server_is_restarted(
    command: Command, live: Live, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says that it waits, goes on with what answers again, and gives the file of an uninterrupted run."""
    broken, whole = tmp_path / "broken.parquet", tmp_path / "whole.parquet"
    assert command("bulk", folder, *WORDS, "--out", whole, "--url", live.url).status == 0
    monkeypatch.setattr(remote, "RETRIES", replace(remote.RETRIES, backoff_s=0.01, max_backoff_s=0.01))
    good = relay(live.url)
    with misbehaving(good, good, good, *[cut] * 20, good) as server:
        done = command("bulk", folder, *WORDS, "--out", broken, "--url", server.url)
    assert (done.status, f"waiting for {server.url}" in done.notes) == (0, True), done.notes
    assert broken.read_bytes() == whole.read_bytes()


TOO_SLOW = reply(504, json.dumps({"detail": "the deadline passed (this server's limit of 3 s)"}).encode())


def count_pictures(request: Received) -> int:
    """How many of the job's pictures a request carries: as parts, or one that is the body."""
    if "probe=" in request.line:  # it asks what answers will be like
        return 0
    if request.headers.get("content-type") == "image/*":
        return 1
    return request.body.count(b'name="images"')


@contextmanager
def serve_slowly(url: str, rows: int) -> Iterator[MisbehavingServer]:
    """A server that has no time for more than ``rows`` pictures at once."""
    answer = relay(url)

    def behave(connection: socket.socket, request: Received) -> bool:
        if len(request.body) < int(request.headers.get("content-length", 0)):
            return False  # the job has ended, and sends no more of it
        return (TOO_SLOW if count_pictures(request) > rows else answer)(connection, request)

    with misbehaving(behave) as server:
        yield server


@pytest.mark.slow
def test_a_server_with_little_time(command: Command, live: Live, folder: Path, tmp_path: Path) -> None:
    """Pictures that took too long together (504) go in smaller requests, later ones at once; the file is the same."""
    outs = (tmp_path / "slow.parquet", tmp_path / "fast.parquet")
    assert command("bulk", folder, *WORDS, "--out", outs[1], "--url", live.url).status == 0
    with serve_slowly(live.url, 5) as server:
        done = command("bulk", folder, *WORDS, "--out", outs[0], "--url", server.url)
    assert done.status == 0, done.notes
    assert re.search(r"has no time for \d+ inputs in a request: it gets \d+ at once", done.notes)
    sizes = [count for request in server.received if (count := count_pictures(request))]
    answered = [size for size in sizes if size <= 5]
    assert (sum(answered), len(sizes) - len(answered) < len(answered)) == (COUNT, True)
    slow, fast = (read(out) for out in outs)
    assert slow["key"] == fast["key"]
    np.testing.assert_allclose(slow["pool"], fast["pool"], atol=1e-6)
