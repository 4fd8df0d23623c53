"""``layertap serve`` and ``check`` as processes: what goes wrong is told at once, what goes well to whoever looks."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server import CACHE
from tests.service.cli.commands import Command
from tests.service.load_server import ROOT
from tests.service.support import Json

END_S = 120
SERVE = (sys.executable, "-m", "layertap", "serve", "--port")
NET = {"source": "python:tests.nets:Chain", "weights": "random:0", "device": "cpu"}
INPUTS = [{"name": "x", "shape": [3, 8, 8]}]
CHAIN: Json = {"name": "chain", **NET, "inputs": INPUTS}
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BROKEN: Json = {"name": "broken", "source": "torchvision:resnet18", "weights": "broken.safetensors"}


@pytest.fixture
def torchless(tmp_path: Path) -> dict[str, str]:
    """Variables for a process in which importing torch ends it with a status of its own."""
    (tmp_path / "torch.py").write_text("raise SystemExit(99)\n")
    return environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process that has no settings but these."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    return {**bare, "LAYERTAP_CACHE_DIR": str(CACHE), "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}


def models(folder: Path, *entries: Json) -> str:
    """The path of a configuration, beside a file of weights that is none."""
    (folder / "broken.safetensors").write_bytes(b"no tensors")
    file = folder / "models.json"
    file.write_text(json.dumps({"models": entries}))
    return str(file)


def test_taken_port(torchless: dict[str, str]) -> None:
    """A port that is taken is told in a line, with what to type instead, before torch is imported."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = [*SERVE, str(port)]
        done = subprocess.run(words, cwd=ROOT, env=torchless, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"127.0.0.1:{port} is taken" in line
    assert "--port" in line


def test_refuses_connections_at_first(torchless: dict[str, str], tmp_path: Path) -> None:
    """Until it can answer, a server refuses connections instead of keeping them waiting: a proxy asks another one."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "torch.py").write_text(f"open({str(gate)!r}).read()\nraise SystemExit(99)\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    variables = {**torchless, "LAYERTAP_WORKERS": "0"}
    with subprocess.Popen([*SERVE, str(port)], cwd=ROOT, env=variables, stderr=subprocess.DEVNULL) as running:
        try:
            with gate.open("w"), pytest.raises(ConnectionRefusedError):  # the gate opens when torch is imported
                socket.create_connection(("127.0.0.1", port), END_S)
            assert running.wait(END_S) == 99
        finally:
            running.kill()


def test_asked_to_end_at_once(torchless: dict[str, str], tmp_path: Path) -> None:
    """A server that is asked to end while it still reads its configuration does, with status 0 and without a word."""
    config = tmp_path / "models.yaml"
    os.mkfifo(config)
    words = [*SERVE, "0", "--config", str(config)]
    with subprocess.Popen(words, cwd=ROOT, env=torchless, stderr=subprocess.PIPE, text=True) as running:
        try:
            with config.open("w"):  # which waits for the server to read
                running.send_signal(signal.SIGTERM)
                assert running.stderr is not None
                assert running.stderr.read() == ""
                assert running.wait(END_S) == 0
        finally:
            running.kill()


def test_check(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` loads every model and says what became of each; what would be downloaded for a lazy one is left out."""
    lazy = {"name": "later", "source": "torchvision:resnet18", "load": "lazy"}
    monkeypatch.setenv("LAYERTAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LAYERTAP_WORKERS", "0")
    done = command("check", "--config", models(tmp_path, CHAIN, lazy, BROKEN))
    assert (done.status, "Traceback" in done.notes) == (2, False)
    said = dict(line.split(": ", 1) for line in done.out.splitlines())
    assert said.pop("chain").startswith("ready on cpu")
    assert said.pop("later").startswith("not loaded")
    assert said.pop("SafetensorError").startswith("Error while deserializing header")
    assert {name: each.partition(":")[0] for name, each in said.items()} == {"broken": "failed"}


@pytest.mark.slow
def test_on_a_terminal() -> None:
    """A person is told what is loaded, then where the server is, and what it has."""
    ours, theirs = pty.openpty()
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    words, env, data = [*SERVE, "0"], environment(TERM="xterm-256color"), bytearray()

    def read_until(words: str | None) -> str:
        """What it has shown, without colours, once these words are there, or once it has ended."""
        shown = ""
        with suppress(OSError):  # how Linux says that nobody writes any more
            while words is None or words not in shown:
                data.extend(os.read(ours, 4096))
                shown = STYLE.sub("", data.decode(errors="replace")).replace("\r", "")
        return shown

    with subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **ends) as running:  # type: ignore[call-overload]
        try:
            os.close(theirs)
            text = read_until("Ctrl+C")
            assert "is loading torch, then digits" in text
            (url,) = re.findall(r"is ready on (http://127\.0\.0\.1:\d+)\n", text)
            assert re.search(r"models +digits +ready +cpu, the default\n", text)
            assert re.search(r"keys +not needed", text)
            assert "/docs says what to send" in text
            assert "{" not in text.partition("is ready on")[0]
            assert httpx.get(f"{url}/models").status_code == 200
            assert "GET /models 200" in read_until("GET /models 200")
            running.send_signal(signal.SIGINT)
            text = read_until(None)
            assert running.wait(END_S) == 0
            assert "Traceback" not in text
            assert "serving for" not in text
        finally:
            running.kill()
            os.close(ours)
