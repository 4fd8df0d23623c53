"""What ``PUT /models/NAME`` may bring is what the configuration names, and looking for it keeps nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import httpx
import pytest
from safetensors.torch import save_file

from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, Versions, entry, fingerprint, make_state, put
from tests.service.support import Json, problem

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
    "an adapter elsewhere": {"adapter": "adapter"},
    "an adapter of a folder above": {"adapter": "weights/../adapter"},
    "an adapter by a link that leads out": {"adapter": "weights/adapter"},
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
    (versions.folder / "weights" / "adapter").symlink_to(versions.folder / "adapter")
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


def test_fields_of_the_entry(serve: Serve, versions: Versions) -> None:
    """Other fields are as the file has them, or left out."""
    with serve(versions.write(entry("a", dtype="bfloat16"), allow=ALLOW), config=versions.file) as live:
        assert put(live, "b", dtype="bfloat16").json()["dtype"] == "bfloat16"
        assert put(live, "b").json()["dtype"] == "float32"
        assert "reload" in problem(put(live, "b", dtype="float16"), 403)["hint"]


def test_nothing_allowed(serve: Serve, versions: Versions) -> None:
    """Without ``allow`` in the file nothing can be exchanged, not even a model for itself."""
    with serve(versions.write(entry("a")), config=versions.file) as live:
        assert "allows no model" in problem(put(live, "a"), 403)["detail"]


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
def put_and_wait(live: Live, folder: SlowFolder) -> Iterator[Future[httpx.Response]]:
    """Ask for a version whose folder is looked at until the block ends."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(put, live, "b")
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
        with put_and_wait(live, folder) as reply:
            first = fingerprint(live)
            assert not reply.done()
        assert reply.result().status_code == 200
        assert fingerprint(live) != first


def test_a_folder_that_does_not_answer(serve: Serve, versions: Versions) -> None:
    """A folder that is not looked at in time costs the request for the version, and nothing else."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    folder = SlowFolder.of(configuration)
    with serve(replace(configuration, allowed=folder), config=versions.file, deadline_s=2.0, cpu_threads=2) as live:
        first = fingerprint(live)
        with put_and_wait(live, folder) as reply:
            problem(reply.result(), 504, seconds=True)
        assert "replacement" not in live.client.get("/models/gated").json()
        assert fingerprint(live) == first


def test_read_anew_meanwhile(serve: Serve, versions: Versions) -> None:
    """What a file allows that is read while a folder is looked at counts for the version, and nothing of the former."""
    first = entry("a", "first")
    configuration = versions.write(first, entry("a"), allow=ALLOW)
    folder = SlowFolder.of(configuration)
    with serve(replace(configuration, allowed=folder), config=versions.file, cpu_threads=2) as live:
        with put_and_wait(live, folder) as reply:
            versions.write(first, entry("a"), allow={})
            assert live.client.post("/models/reload").status_code == 200
        assert "not allowed" in problem(reply.result(), 403)["detail"]
