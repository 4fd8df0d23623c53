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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from threading import Thread
from typing import Any

import httpx
import pytest

from layertap.service.http.sockets import bind, format_url
from tests.conftest import WARM
from tests.server import CACHE
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT
from tests.service.support import Json

END_S = 120
NET = {"source": "python:tests.nets:Chain", "weights": "random:0", "device": "cpu"}
INPUTS = [{"name": "x", "shape": [3, 8, 8]}]
CHAIN: Json = {"name": "chain", **NET, "inputs": INPUTS}
BROKEN: Json = {"name": "broken", "source": "torchvision:resnet18", "weights": "broken.safetensors"}
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def torchless(tmp_path: Path) -> dict[str, str]:
    """Variables for a process in which importing torch ends it with a status of its own."""
    (tmp_path / "torch.py").write_text("raise SystemExit(99)\n")
    return environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process that has no settings but these."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    return {**bare, "LAYERTAP_CACHE_DIR": str(CACHE), "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "layertap", *words]


@contextmanager
def start(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block, however that ends: an error in it is not waited away."""
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options) as running:
        try:
            yield running
        finally:
            running.kill()


def run(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command's status and what it says; nobody sits before it."""
    return subprocess.run(
        command(*words), cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


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
        done = run("serve", "--port", str(port), env=torchless)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"127.0.0.1:{port} is taken" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (("--host", "nowhere.invalid"), {"LAYERTAP_API_KEYS": "k"}, "'nowhere.invalid' can't be resolved"),
        (("--host", "a..b"), {"LAYERTAP_API_KEYS": "k"}, "'a..b' can't be resolved"),
        (("--host", "192.0.2.1"), {"LAYERTAP_API_KEYS": "k"}, "192.0.2.1:8000 is no address of this machine"),
        (("--config", "nowhere.yaml"), {}, "can't read nowhere.yaml"),
        ((), {"LAYERTAP_LOG_FORMAT": "xml"}, "LAYERTAP_LOG_FORMAT"),
        ((), {"LAYERTAP_DRAIN_DELAY_S": "-1"}, "LAYERTAP_DRAIN_DELAY_S"),
        ((), {"LAYERTAP_ALLOW_URLS": "http://x"}, "LAYERTAP_ALLOW_URLS"),
        (("--root-path", "/models"), {}, "LAYERTAP_ROOT_PATH: /models is a path of the server's own"),
    ],
)
def test_mistakes(torchless: dict[str, str], words: tuple[str, ...], variables: dict[str, str], says: str) -> None:
    """A host that can't be had and a mistake in the settings or the configuration end with a line and status 2."""
    done = run("serve", *words, env=torchless | variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert says in line


def test_mistake_in_a_configuration(torchless: dict[str, str], tmp_path: Path) -> None:
    """What can be seen in a file is told before torch is imported; a good file gets that far."""
    bad = models(tmp_path, {**CHAIN, "dtype": "float33"})
    for word in ("serve", "check"):
        done = run(word, "--config", bad, env=torchless)
        assert done.returncode == 2
        assert "models.0.dtype" in done.stderr
    for word in ("serve", "check"):
        words = ["--port", "0"] if word == "serve" else []
        assert run(word, *words, "--config", models(tmp_path, CHAIN), env=torchless).returncode == 99


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_at_once(torchless: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """A server that is asked to end while it still reads its configuration does, with status 0 and without a word."""
    config = tmp_path / "models.yaml"
    os.mkfifo(config)
    words = command("serve", "--port", "0", "--config", str(config))
    with (
        start(words, env=torchless) as running,
        config.open("w"),  # which waits for the server to read
    ):
        running.send_signal(number)
        assert running.stderr is not None
        assert running.stderr.read() == ""
        assert running.wait(END_S) == 0


SWALLOWS = """
import signal
from layertap.service.signals import exit_cleanly_on_signals

exit_cleanly_on_signals()
try:
    signal.raise_signal(signal.{})
except BaseException:
    pass
raise SystemExit(5)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_end_where_exceptions_are_swallowed(number: signal.Signals) -> None:
    """A server that is asked to end while it imports ends, though a library swallows all exceptions just then."""
    words = [sys.executable, "-c", SWALLOWS.format(number.name)]
    assert subprocess.run(words, env=environment(), timeout=END_S).returncode == 0


def test_closed_streams(tmp_path: Path) -> None:
    """A server whose standard streams are closed serves, and no socket takes their numbers."""
    path = tmp_path / "socket"
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command("serve", "--uds", str(path))]
    running = subprocess.Popen(words, env=environment(LAYERTAP_WORKERS="0", LAYERTAP_DRAIN_DELAY_S="0"))
    try:
        wait_until(lambda: path.exists() or running.poll() is not None)
        assert running.poll() is None
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=END_S) as client:
            assert client.get("/livez").status_code == 200
        streams = [Path(f"/proc/{running.pid}/fd/{number}").readlink() for number in range(3)]
        assert streams == [Path(os.devnull)] * 3
        running.terminate()
        assert running.wait(END_S) == 0
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(("host", "families"), [("127.0.0.1", 1), ("localhost", 2), ("::1", 1)])
def test_bind(host: str, families: int) -> None:
    """Every address of a host is listened on, all on one port, and again as soon as that has ended."""
    if ":" in host and not _has_ipv6():
        pytest.skip("there is no IPv6")
    port = 0
    for _ in range(2):
        listeners = bind(host, port)
        assert 1 <= len(listeners) <= families
        (port,) = {listener.getsockname()[1] for listener in listeners}
        assert format_url(listeners[0].getsockname()).endswith(f":{port}")
        with socket.create_connection((host, port)) as client:
            accepted = [listener.accept()[0] for listener in listeners if select([listener], [], [], 0)[0]]
            assert len(accepted) == 1
            accepted[0].close()  # first, so that the system remembers the connection
            assert client.recv(1) == b""
        for listener in listeners:
            listener.close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_default_delay() -> None:
    """Where nobody sits before it, a server that is asked to end goes on for 5 s."""
    words = command("serve", "--port", "0")
    with start(words, env=environment(), stdin=subprocess.DEVNULL) as running:
        assert running.stderr is not None
        lines = (json.loads(line) for line in running.stderr)
        assert any(line["message"].startswith("listening on") for line in lines)
        running.terminate()
        seconds = next(line["seconds"] for line in lines if line["message"] == "draining")
        running.terminate()
        assert [line for line in lines if line["level"] not in ("info", "debug")] == []
        assert running.wait(END_S) == 0
    assert seconds == 5


def test_version(torchless: dict[str, str]) -> None:
    """``--version`` says which it is."""
    done = run("--version", env=torchless)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"layertap \d+\.\d+.*\n", done.stdout)


def test_check(tmp_path: Path) -> None:
    """``check`` loads every model and says what became of each; what would be downloaded for a lazy one is left out."""
    lazy = {"name": "later", "source": "torchvision:resnet18", "load": "lazy"}
    loaded = {**CHAIN, "name": "lazy", "load": "lazy"}
    done = run("check", "--config", models(tmp_path, CHAIN, loaded, lazy), env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    chain, second, left = done.stdout.splitlines()
    assert chain.startswith("chain: ready on cpu")
    assert second.startswith("lazy: ready on cpu")
    assert left.startswith("later: not loaded")


@pytest.mark.slow
def test_check_of_what_fails(tmp_path: Path) -> None:
    """A model whose weights can't be read, and a warm plan for a layer that is not there: status 2, and why."""
    warm = {**CHAIN, "name": "warm", "warm": [{"layers": ["cnv"], "compile": True}]}
    done = run("check", "--config", models(tmp_path, BROKEN, warm, CHAIN), env=environment())
    assert done.returncode == 2
    broken, plan, chain = done.stdout.splitlines()
    assert broken.startswith("broken: failed: ")
    assert "cnv" in plan
    assert plan.startswith("warm: failed: ")
    assert chain.startswith("chain: ready")
    assert "Traceback" not in done.stderr


WAITING = """
import time

def waiting():
    print("building", flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a wait is noticed after it
"""


@pytest.mark.slow
def test_interrupted_check(tmp_path: Path) -> None:
    """Ctrl+C ends ``check`` while a model is loaded, with the status that shells know, and says no more."""
    (tmp_path / "own_waiting.py").write_text(WAITING)
    config = models(tmp_path, {**CHAIN, "source": "python:own_waiting:waiting"}, {**CHAIN, "name": "next"})
    words = command("check", "--config", config)
    with start(words, env=environment(), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "building\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=END_S) == ("", "")
        assert running.returncode == 130


@dataclass
class Terminal:
    """What a process has written to a terminal, without colours, and the process."""

    running: subprocess.Popen[bytes]
    data: bytearray

    @property
    def text(self) -> str:
        return STYLE.sub("", self.data.decode(errors="replace")).replace("\r", "")

    def shows(self, words: str) -> None:
        wait_until(lambda: words in self.text or self.running.poll() is not None)
        assert words in self.text, self.text


@contextmanager
def terminal(*words: str, **variables: str) -> Iterator[Terminal]:
    """A command on a terminal of its own."""
    ours, theirs = pty.openpty()
    settings = environment(TERM="xterm-256color", **variables)
    with subprocess.Popen(
        command(*words), cwd=ROOT, env=settings, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as running:
        os.close(theirs)
        shown = Terminal(running, bytearray())
        reader = Thread(target=_read, args=(ours, shown.data))
        reader.start()
        try:
            yield shown
        finally:
            running.kill()
            reader.join()
            os.close(ours)


def _read(descriptor: int, data: bytearray) -> None:
    with suppress(OSError):  # how Linux says that nobody writes any more
        while part := os.read(descriptor, 4096):
            data += part


def test_on_a_terminal() -> None:
    """A person is told what is loaded, then where the server is, and what it has."""
    with terminal("serve", "--port", "0") as shown:
        shown.shows("is loading torch, then digits")
        shown.shows("Ctrl+C")
        text = shown.text
        (url,) = re.findall(r"is ready on (http://127\.0\.0\.1:\d+)\n", text)
        assert re.search(r"models +digits +ready +cpu, the default\n", text)
        assert re.search(r"keys +not needed", text)
        assert "/docs says what to send" in text
        assert "{" not in text.partition("is ready on")[0]
        assert httpx.get(f"{url}/models").status_code == 200
        shown.shows("GET /models 200")
        shown.running.send_signal(signal.SIGINT)
        assert shown.running.wait(END_S) == 0
        assert "Traceback" not in shown.text
        assert "serving for" not in shown.text


@pytest.mark.slow
def test_failure_and_keys_on_a_terminal(tmp_path: Path) -> None:
    """A model that fails is told with the reason; where keys are needed, it says so and shows none."""
    config = models(tmp_path, CHAIN, BROKEN)
    with terminal("serve", "--port", "0", "--config", config, LAYERTAP_API_KEYS="s3cret") as shown:
        shown.shows("is loading torch, then chain, broken")
        shown.shows("Ctrl+C")
        assert re.search(r"chain +ready +cpu, the default\n", shown.text)
        assert re.search(r"broken +failed +\S+", shown.text)
        assert "is not ready on http://127.0.0.1:" in shown.text
        assert "s3cret" not in shown.text
        assert re.search(r"keys +needed\n", shown.text)
        shown.running.terminate()
        assert shown.running.wait(END_S) == 0


@pytest.mark.slow
def test_compiling_on_a_terminal(tmp_path: Path, compiler: str) -> None:
    """While a warm plan is compiled it is told which graph, and of how many."""
    warm = {**CHAIN, "warm": [{"layers": list(WARM.layers[:1]), "compile": True}]}
    with terminal(
        "serve", "--port", "0", "--config", models(tmp_path, warm), LAYERTAP_CACHE_DIR=str(tmp_path / "cache")
    ) as shown:
        shown.shows("chain: compiling graph 1 of 2")
        shown.shows("chain: compiling graph 2 of 2")
        shown.running.send_signal(signal.SIGTERM)
        assert shown.running.wait(END_S) == 0


@pytest.mark.slow
def test_format_by_setting() -> None:
    """``LOG_FORMAT`` wins over what the terminal suggests, and so does ``DRAIN_DELAY_S``."""
    with terminal("serve", "--port", "0", LAYERTAP_LOG_FORMAT="json", LAYERTAP_DRAIN_DELAY_S="3600") as shown:
        shown.shows('"message": "listening on ')
        url = re.findall(r"listening on ([^\"]*)", shown.text)[0]
        assert all(line.startswith("{") for line in shown.text.splitlines())
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        shown.running.send_signal(signal.SIGTERM)
        shown.shows('"message": "draining"')
        assert httpx.get(f"{url}/livez").status_code == 200
