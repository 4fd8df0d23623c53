"""A model gets another version while it answers: no request fails, and each is answered by one version."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save_file

from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, WAITING, Versions, entry, make_state
from tests.service.gated_server import gated_module, hold_model, post_rows, wait_until
from tests.service.support import Array, Json, arrays_of, npy, problem, raw

CLIENTS = 6
EXCHANGES = "bcab"
ADMIN, USER = {"x-api-key": "admin"}, {"x-api-key": "user"}


def put(live: Live, letter: str, **fields: Any) -> httpx.Response:
    """Ask for another version."""
    headers = fields.pop("headers", {})
    return live.client.put("/models/gated", json=entry(letter, **fields), headers=headers)


def ask(client: httpx.Client, rows: Array, model: str = "gated", **query: Any) -> httpx.Response:
    return client.post("/extract", **raw(npy(rows), "application/x-npy", layers="linear", model=model, **query))


def fingerprint(live: Live) -> str:
    reply = ask(live.client, np.ones((1, 4), np.float32))
    assert reply.status_code == 200, reply.text
    return reply.headers["x-layertap-fingerprint"]


@dataclass
class Client:
    """Asks again and again, with other rows each time and some of them twice, until it is told to stop."""

    url: str
    number: int
    stop: threading.Event
    replies: list[tuple[Array, httpx.Response]] = field(default_factory=list)

    def run(self) -> None:
        random = np.random.default_rng(self.number)
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self.stop.is_set():
                # Few different rows, so that answers of all versions to the same ones are kept.
                rows = np.full((int(random.integers(1, 4)), 4), random.integers(1, 5), np.float32)
                query = {"probe": "true"} if random.random() < 0.2 else {}
                self.replies.append((rows, ask(client, rows, **query)))


@pytest.mark.parametrize("workers", [0, 2])
def test_exchanged_under_load(serve: Serve, versions: Versions, workers: int) -> None:
    """Of requests that come all the time none fails, and each answer is by its fingerprint just one version's own.

    Answers are kept meanwhile: none is that of another version.
    """
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration, config=versions.file, workers=workers, cache_bytes=2**20) as live:
        letters = {fingerprint(live): "a"}
        stop = threading.Event()
        clients = [Client(live.url, number, stop) for number in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(client.run) for client in clients]
            try:
                for letter in EXCHANGES:
                    reply = put(live, letter)
                    assert reply.status_code == 200, reply.text
                    letters[fingerprint(live)] = letter
                    _wait_for_replies(clients, 3)
            finally:
                stop.set()
            for each in running:
                each.result()
        replies = [reply for client in clients for reply in client.replies]
        assert {reply.status_code for _, reply in replies} == {200}
        assert sorted(letters.values()) == ["a", "b", "c"]
        answered = set()
        for rows, reply in replies:
            letter = letters[reply.headers["x-layertap-fingerprint"]]
            np.testing.assert_allclose(arrays_of(reply)["linear"], versions.answer(letter, rows), rtol=1e-4, atol=1e-4)
            answered.add(letter)
        assert answered == {"a", "b", "c"}
        wait_until(lambda: len(live.engine.manager.list_workers()) == 1)


def _wait_for_replies(clients: Sequence[Client], count: int) -> None:
    """Return once each client has so many replies more."""
    goals = [len(client.replies) + count for client in clients]
    wait_until(lambda: all(len(client.replies) >= goal for client, goal in zip(clients, goals, strict=True)))


def test_answered_by_the_version_it_came_to(serve: Serve, versions: Versions) -> None:
    """What runs or waits is answered by the version that it came to, though the next one answers others already."""
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file) as live, ThreadPoolExecutor(1) as pool:
        first = fingerprint(live)
        with hold_model(live) as module:
            waits = pool.submit(post_rows, live, 2)
            wait_until(lambda: live.engine.take_snapshot().queue_rows == 2)
            assert put(live, "b").status_code == 200
            second = fingerprint(live)
            assert gated_module(live) is not module
            assert not waits.done()
        assert waits.result().headers["x-layertap-fingerprint"] == first != second
        wait_until(lambda: len(live.engine.manager.list_workers()) == 1)


def test_one_version_for_all_parts(serve: Serve, versions: Versions) -> None:
    """A request of several forwards has all of them from the version that it came to: its probes are of that too."""
    configuration, rows = versions.write(entry("a"), allow=ALLOW), np.ones((1, 4), np.float32)
    with serve(configuration, config=versions.file) as live:
        expected = ask(live.client, rows, probe="true").json()
    with serve(configuration, config=versions.file) as live, ThreadPoolExecutor(1) as pool:
        with hold_model(live):
            asked = pool.submit(ask, live.client, rows, probe="true")
            wait_until(lambda: live.engine.take_snapshot().queue_rows == 1)
            assert put(live, "b").status_code == 200
        assert asked.result().json() == expected
        assert ask(live.client, rows, probe="true").json()["receipts"] != expected["receipts"]


def test_weights_of_the_same_file(serve: Serve, versions: Versions) -> None:
    """The same entry reads its file again: with other weights in it the model is another one."""
    with serve(versions.write(entry("a"), allow={}), config=versions.file) as live:
        first = fingerprint(live)
        assert put(live, "a").status_code == 200
        assert fingerprint(live) == first
        save_file(make_state("c"), versions.folder / "weights" / "a.safetensors")
        body = put(live, "a").json()
        assert (body["state"], body["name"]) == ("ready", "gated")
        assert fingerprint(live) != first


def test_a_version_that_fails(serve: Serve, versions: Versions) -> None:
    """What can't be loaded is refused with the reason, and the former version goes on; the list has the reason too."""
    (versions.folder / "weights" / "broken.safetensors").write_bytes(b"nothing")
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file) as live:
        first = fingerprint(live)
        for letter in ("broken", "gone"):
            refused = problem(put(live, letter), 422)
            assert "could not be loaded" in refused["detail"]
            shown = live.client.get("/models/gated").json()
            assert (shown["state"], shown["replacement"]["state"]) == ("ready", "failed")
            assert shown["replacement"]["reason"]
            assert str(versions.folder) not in str(shown)
        assert fingerprint(live) == first
        assert live.client.get("/readyz").status_code == 200
        assert put(live, "b").status_code == 200
        assert "replacement" not in live.client.get("/models/gated").json()


def test_one_that_is_not_loaded(serve: Serve, versions: Versions) -> None:
    """A model that is not loaded, or has failed, is loaded as its next version."""
    models = [entry("a", load="lazy"), entry("gone", "missing", required=False)]
    with serve(versions.write(*models, allow=ALLOW), config=versions.file) as live:
        assert put(live, "b", load="lazy").json()["state"] == "ready"
        body = live.client.put("/models/missing", json=entry("c", "missing")).json()
        assert (body["state"], "reason" in body) == ("ready", False)
        assert ask(live.client, np.ones((1, 4), np.float32), model="missing").status_code == 200


def test_a_version_that_takes_long(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Where loading takes longer than a request may, 202 says so, and the version answers once it is there.

    Meanwhile the former one answers, another exchange is refused, and other models load and are exchanged.
    """
    configuration = versions.write(
        entry("a"), entry("a", "other"), entry("a", "lazy", load="lazy"), allow={**ALLOW, "sources": [WAITING]}
    )
    with serve(configuration, config=versions.file, deadline_s=1.0) as live:
        first = fingerprint(live)
        reply = put(live, "b", source=WAITING)
        assert reply.status_code == 202
        assert reply.json()["replacement"] == {"state": "loading"}
        assert "is being exchanged" in problem(put(live, "c"), 409)["detail"]
        assert fingerprint(live) == first
        assert live.client.put("/models/other", json=entry("b", "other")).status_code in (200, 202)
        wait_until(lambda: "replacement" not in live.client.get("/models/other").json())
        wait_until(lambda: ask(live.client, np.ones((1, 4), np.float32), model="lazy").status_code == 200)
        assert live.client.get("/readyz").status_code == 200
        gate.set()
        wait_until(lambda: "replacement" not in live.client.get("/models/gated").json())
        assert fingerprint(live) != first


@dataclass(frozen=True)
class SlowFolder(Allowed):
    """A folder on a mount that answers once its gate is open."""

    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def check(self, spec: ModelSpec, configured: ModelSpec) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        super().check(spec, configured)

    @classmethod
    def of(cls, configuration: Configuration) -> SlowFolder:
        """What a configuration allows."""
        assert configuration.allowed is not None
        return cls(**asdict(configuration.allowed))


@contextmanager
def put_and_wait(live: Live, folder: SlowFolder, letter: str, name: str) -> Iterator[Future[httpx.Response]]:
    """Ask for a version whose folder is looked at until the block ends."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(live.client.put, f"/models/{name}", json=entry(letter, name))
        try:
            assert folder.entered.wait(60)
            yield reply
        finally:
            folder.gate.set()


def test_a_folder_far_away(serve: Serve, versions: Versions) -> None:
    """While it is looked whether a folder has the weights others are answered, and the version comes after that."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    folder = SlowFolder.of(configuration)
    with serve(replace(configuration, allowed=folder), config=versions.file, cpu_threads=2) as live:
        with put_and_wait(live, folder, "b", "gated") as reply:
            first = fingerprint(live)
            assert not reply.done()
        assert reply.result().status_code == 200
        assert fingerprint(live) != first


def test_a_folder_that_does_not_answer(serve: Serve, versions: Versions) -> None:
    """A folder that is not looked at in time costs the request for the version, and nothing else."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    folder = SlowFolder.of(configuration)
    with serve(replace(configuration, allowed=folder), config=versions.file, deadline_s=1.0, cpu_threads=2) as live:
        first = fingerprint(live)
        with put_and_wait(live, folder, "b", "gated") as reply:
            problem(reply.result(), 504, seconds=True)
        assert "replacement" not in live.client.get("/models/gated").json()
        assert fingerprint(live) == first


def test_read_anew_meanwhile(serve: Serve, versions: Versions) -> None:
    """What a file allows that is read while a folder is looked at counts for the version, and nothing of the former."""
    first = entry("a", "first")
    configuration = versions.write(first, entry("a"), allow=ALLOW)
    folder = SlowFolder.of(configuration)
    with serve(replace(configuration, allowed=folder), config=versions.file, cpu_threads=2) as live:
        with put_and_wait(live, folder, "b", "gated") as reply:
            versions.write(first, entry("a"), allow={})
            assert live.client.post("/models/reload").status_code == 200
        assert "not allowed" in problem(reply.result(), 403)["detail"]


REFUSED: dict[str, Json] = {
    "inputs that take all memory": {"inputs": [{"name": "x", "shape": [10**12]}]},
    "thousands of devices": {"device": "auto", "devices": [f"cpu:{number}" for number in range(5000)]},
    "compiling all layers": {"warm": [{"layers": ["*"], "compile": "always"}]},
    "another dtype": {"dtype": "bfloat16"},
    "a file elsewhere": {"weights": "a.safetensors"},
    "a folder above": {"weights": "weights/../a.safetensors"},
    "an absolute path": {"weights": "/tmp/a.safetensors"},
    "a link that leads out": {"weights": "weights/link.safetensors"},
    "what is no path": {"weights": "weights/\0.safetensors"},
    "labels that are no path": {"labels": "weights/\0"},
    "released weights": {"weights": "DEFAULT"},
    "another factory": {"source": "python:tests.service.nets_http:Touchy"},
    "a factory of the library": {"source": "python:os:system", "weights": "DEFAULT"},
    "another kind of source": {"source": "torchvision:resnet18"},
    "labels elsewhere": {"labels": "names.txt"},
    "a text beside the weights": {"labels": "weights/names.txt"},
    "labels of a folder above": {"labels": "labels/../names.txt"},
    "labels by a link that leads out": {"labels": "labels/link.txt"},
    "an argument": {"args": {"bias": False}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_not_allowed(serve: Serve, versions: Versions, what: str) -> None:
    """What the configuration does not name is refused, and no path, import or argument of it is looked at."""
    save_file(make_state("b"), versions.folder / "a.safetensors")
    (versions.folder / "weights" / "link.safetensors").symlink_to(versions.folder / "a.safetensors")
    write_names(versions, "names.txt", "weights/names.txt", "labels/names.txt")
    (versions.folder / "labels" / "link.txt").symlink_to(versions.folder / "names.txt")
    allow = ALLOW | {"labels": ["labels/"]}
    with serve(versions.write(entry("a"), allow=allow), config=versions.file) as live:
        first = fingerprint(live)
        found = problem(live.client.put("/models/gated", json=entry("b") | REFUSED[what]), 403)
        assert "not allowed" in found["detail"]
        assert fingerprint(live) == first


def write_names(versions: Versions, *paths: str) -> None:
    """Write files of names of the classes, each with others."""
    for path in paths:
        file = versions.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{path} {number}\n" for number in range(3)))


def test_allowed_labels(serve: Serve, versions: Versions) -> None:
    """Files of labels come from folders of their own, or as they are named; lists, and what the file has, are free."""
    write_names(versions, "labels/b.txt", "names.txt", "own.txt")
    allow = ALLOW | {"labels": ["labels/", "names.txt"]}
    with serve(versions.write(entry("a", labels="own.txt"), allow=allow), config=versions.file) as live:
        for labels, origin in (
            ("labels/b.txt", "b.txt"),
            ("names.txt", "names.txt"),
            (["x", "y", "z"], "configuration"),
            ("own.txt", "own.txt"),
        ):
            assert put(live, "b", labels=labels).json()["labels"] == {"count": 3, "from": origin}
        problem(put(live, "b", labels="labels.txt"), 403)


def test_allowed_fields(serve: Serve, versions: Versions) -> None:
    """Fields that the file names may change, and what the file leaves out may be left out."""
    allow = ALLOW | {"fields": ["dtype"]}
    with serve(versions.write(entry("a"), allow=allow), config=versions.file) as live:
        assert put(live, "b", dtype="bfloat16").json()["dtype"] == "bfloat16"
        assert put(live, "b").json()["dtype"] == "float32"
        problem(put(live, "b", decode="fast"), 403)


def test_nothing_allowed(serve: Serve, versions: Versions) -> None:
    """Without ``allow`` in the file nothing can be exchanged, not even a model for itself."""
    with serve(versions.write(entry("a")), config=versions.file) as live:
        assert "allows no model" in problem(put(live, "a"), 403)["detail"]


def test_keys(serve: Serve, versions: Versions) -> None:
    """Only administrators exchange models, and have the file read."""
    keys = {"api_keys": ("user",), "admin_keys": ("admin",)}
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file, **keys) as live:
        problem(put(live, "b"), 401)
        problem(put(live, "b", headers=USER), 403)
        problem(live.client.post("/models/reload", headers=USER), 403)
        assert put(live, "b", headers=ADMIN).status_code == 200
        assert live.client.post("/models/reload", headers=ADMIN).status_code == 200


BAD: dict[str, tuple[Any, int, str]] = {
    "no object": ([1], 400, "no JSON object"),
    "another name": (entry("b", "other"), 422, "by the name in the path"),
    "a field that there is not": (entry("b", wieghts="b"), 422, "the nearest is 'weights'"),
    "a value of another type": (entry("b", dtype="float8"), 422, "float32"),
    "no source": ({"weights": "weights/b.safetensors"}, 422, "Field required"),
    "tf32": (entry("b", tf32=True, device="cuda"), 422, "tf32"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_entries(serve: Serve, versions: Versions, what: str) -> None:
    """An entry that makes no sense is refused as in the file, with the place."""
    body, status, words = BAD[what]
    with serve(versions.write(entry("a"), allow=ALLOW | {"fields": ["device"]}), config=versions.file) as live:
        found = problem(live.client.put("/models/gated", json=body), status)
        assert words in str(found)
        problem(live.client.put("/models/gated", content=b"{"), 400)
        problem(live.client.put("/models/nothing", json=body if isinstance(body, dict) else {}), 404)
