"""What ``PUT /models/NAME`` may bring is what the configuration names, and looking for it keeps nobody waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import save_file

from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, Versions, entry, fingerprint, make_state, put
from tests.service.support import Json, problem

REFUSED: dict[str, Json] = {
    "inputs that take all memory": {"inputs": [{"name": "x", "shape": [10**12]}]},
    "thousands of devices": {"device": "auto", "devices": [f"cpu:{number}" for number in range(5000)]},
    "compiling all layers": {"warm": [{"layers": ["*"], "compile": "always"}]},
    "a file elsewhere": {"weights": "a.safetensors"},
    "a folder above": {"weights": "weights/../a.safetensors"},
    "a link that leads out": {"weights": "weights/link.safetensors"},
    "what is no path": {"weights": "weights/\0.safetensors"},
    "an adapter elsewhere": {"adapter": "adapter"},
    "an adapter by a link that leads out": {"adapter": "weights/adapter"},
    "released weights": {"weights": "DEFAULT"},
    "another factory": {"source": "python:tests.service.nets_http:Touchy"},
    "a factory of the library": {"source": "python:os:system", "weights": "DEFAULT"},
    "another kind of source": {"source": "torchvision:resnet18"},
    "labels elsewhere": {"labels": "names.txt"},
    "labels by a link that leads out": {"labels": "labels/link.txt"},
    "an argument": {"args": {"bias": False}},
}


def test_not_allowed(serve: Serve, versions: Versions) -> None:
    """What the configuration does not name is refused, and no path, import or argument of it is looked at.

    Without ``allow`` nothing can be exchanged, not even a model for itself.
    """
    save_file(make_state("b"), versions.folder / "a.safetensors")
    (versions.folder / "weights" / "link.safetensors").symlink_to(versions.folder / "a.safetensors")
    (versions.folder / "weights" / "adapter").symlink_to(versions.folder / "adapter")
    (versions.folder / "labels").mkdir()
    for path in ("names.txt", "labels/names.txt"):
        (versions.folder / path).write_text("a\nb\nc\n")
    (versions.folder / "labels" / "link.txt").symlink_to(versions.folder / "names.txt")
    allow = ALLOW | {"labels": ["labels/"]}
    with serve(versions.write(entry("a"), allow=allow), config=versions.file) as live:
        first = fingerprint(live)
        for what, fields in REFUSED.items():
            found = problem(live.client.put("/models/gated", json=entry("b") | fields), 403)
            assert "not allowed" in found["detail"], what
        assert fingerprint(live) == first
        assert put(live, "b", labels="labels/names.txt").json()["labels"] == {"count": 3, "from": "names.txt"}
        assert fingerprint(live) != first
    with serve(versions.write(entry("a")), config=versions.file) as live:
        assert "allows no model" in problem(put(live, "a"), 403)["detail"]


def test_a_folder_that_does_not_answer(serve: Serve, versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not looked at in time costs the request for the version, and nothing else."""
    entered, gate, check = threading.Event(), threading.Event(), Allowed.check

    def check_slowly(self: Allowed, spec: ModelSpec, configured: ModelSpec) -> None:
        entered.set()
        assert gate.wait(60)
        check(self, spec, configured)

    monkeypatch.setattr(Allowed, "check", check_slowly)  # as on a mount that answers once its gate is open
    settings = {"config": versions.file, "deadline_s": 2.0, "cpu_threads": 2}
    with serve(versions.write(entry("a"), allow=ALLOW), **settings) as live, ThreadPoolExecutor(1) as pool:
        first = fingerprint(live)
        reply = pool.submit(put, live, "b")
        try:
            assert entered.wait(60)
            assert fingerprint(live) == first  # others are answered meanwhile
            problem(reply.result(), 504, seconds=True)
        finally:
            gate.set()
        assert "replacement" not in live.client.get("/models/gated").json()
