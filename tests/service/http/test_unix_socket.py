"""A server on a Unix socket: who may open it is answered, and no port is."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from layertap.models.errors import LayertapError
from layertap.service.http.sockets import listen
from tests.service.gated_server import encode_request, parse_response, read_to_end, wait_until
from tests.service.load_server import END_S, Process, process
from tests.service.support import Json, image, picture

BODY: Json = {"layers": ["block3"], "pool": "mean", "inputs": [image(picture(1))]}
LISTEN = "0A"  # the state of a socket that listens, in /proc/net/tcp


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """Where a socket may be; such paths have 107 bytes at most."""
    with TemporaryDirectory() as folder:
        yield Path(folder) / "layertap.sock"


@pytest.fixture(scope="module")
def served(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """``layertap serve`` there."""
    folder = tmp_path_factory.mktemp("served")
    with process(None, folder, wait=False, LAYERTAP_UDS=str(path), LAYERTAP_WORKERS="0") as found:
        with client_of(path) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200)
        yield found


def client_of(path: Path) -> httpx.Client:
    """A client that connects there."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=120)


def listening(pid: int) -> list[str]:
    """The TCP sockets on which a process listens."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            own.add(str(each.readlink()))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [line[1] for line in lines if line[3] == LISTEN and f"socket:[{line[9]}]" in own]


@pytest.mark.slow
def test_served(served: Process, path: Path) -> None:
    """Requests are answered there without a key; its group may open it, others may not; and no port is open."""
    assert served.url == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with client_of(path) as client:
        assert client.post("/extract", json=BODY).status_code == 200
        body = {"layers": ["block1"], "inputs": [image(picture(1))] * 64}
        assert len(client.post("/extract?format=npy", json=body).content) > 1_000_000
    assert listening(served.running.pid) == []


def ask_until_gone(path: Path) -> int:
    """Ask one request after another, each on a connection of its own, until nobody is there; how many were answered."""
    request = httpx.Request("POST", "http://localhost/extract", json=BODY, headers={"connection": "close"})
    count = 0
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(END_S)
            try:
                connection.connect(str(path))
                connection.sendall(encode_request(request))
            except (ConnectionRefusedError, BrokenPipeError):
                return count
            if not (data := read_to_end(connection)):  # a socket that closes resets who has just connected
                return count
            assert parse_response(data).status_code == 200
            count += 1


@pytest.mark.slow
def test_ended(served: Process, path: Path) -> None:
    """When it ends, whoever was let in is answered, and later ones are refused."""
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(ask_until_gone, path) for _ in range(4)]
        with client_of(path) as client:
            assert client.post("/extract", json=BODY).status_code == 200
        served.running.send_signal(signal.SIGTERM)
        assert served.running.wait(END_S) == 0
        assert sum(each.result() for each in crowd)


def test_left_behind(path: Path) -> None:
    """A socket that a server left behind is no obstacle to the next one."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.is_socket()
    (listener,) = listen("", 0, path)
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        listener.accept()[0].close()


def test_taken(path: Path) -> None:
    """A socket that somebody serves stays theirs, however many wait before it."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        with pytest.raises(LayertapError, match="is taken"):
            listen("", 0, path)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
            with pytest.raises(LayertapError, match="is taken"):
                listen("", 0, path)
        path.unlink()


@pytest.mark.parametrize("name", ["file", "nowhere/socket", "x" * 200])
def test_no_place(tmp_path: Path, name: str) -> None:
    """What is no socket stays as it is, and a path that can't be one is told."""
    (tmp_path / "file").write_text("kept")
    with pytest.raises(LayertapError, match="the Unix socket"):
        listen("", 0, tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
