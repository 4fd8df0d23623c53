"""Factories that an operator wrote: where they are found, and what is told of their errors, to whom."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from layertap.service.config.configuration import Configuration, read_configuration
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.support import npy, problem, raw, rows

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, {width})

    def forward(self, x):
        {first}
        return self.linear(x)

def build():
    {built}
    return Net()
"""
FAILURES = {  # code of a factory or a forward, the error's class, and what clients hear beside it
    "value": ({"built": "raise ValueError('secret of the operator')"}, "ValueError", "own code"),
    "name": ({"first": "y = undefined_name"}, "NameError", "own forward raised NameError"),
    "shape": ({"first": "self.linear(x[:, :3])"}, "RuntimeError", "can't take an input of this shape"),
}


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    """What tests import from their folders is forgotten."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def written(folder: Path, name: str, *, first: str = "", built: str = "", width: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(NET.format(first=first or "pass", built=built or "pass", width=width))
    return file


def configuration(folder: Path, source: str, **fields: object) -> Configuration:
    entry = {"name": "own", "source": source, "inputs": [{"name": "x", "shape": [4]}], "device": "cpu", **fields}
    (folder / "models.json").write_text(json.dumps({"models": [entry]}))
    return read_configuration(folder / "models.json", before_loading=True)


@pytest.mark.parametrize("kind", FAILURES)
def test_code_that_raises(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """The log has the traceback; clients hear the class, whose code it is, and of a shape only where that may be it."""
    code, name, said = FAILURES[kind]
    file = written(tmp_path, f"own_{kind}", **code)
    with serve(configuration(tmp_path, f"python:{file.stem}:build"), wait=False) as live:
        wait_until(lambda: live.client.get("/models/own").json()["state"] == "failed")
        reply = live.client.post("/extract", **raw(npy(rows()), "application/x-npy", layers="linear"))
        reason = live.client.get("/models/own").json()["reason"]
        for shown in (reason, str(problem(reply, 503))):
            assert name in shown
            assert said in shown
            assert ("of this shape" in shown) == (kind == "shape")
            assert "secret" not in shown
        assert "/" not in reason
    assert caplog.messages.count("a model could not be loaded") == 1
    assert f'{file}", line' in caplog.text  # as formatted when it was logged: nothing keeps the frames
    assert next(iter(code.values())) in caplog.text


def test_found_first(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's own package is meant before an installed one of its name, and that of no other import changes."""
    installed, beside, working = (tmp_path / name for name in ("installed", "beside", "working"))
    for width, folder in enumerate((beside, working, installed), 5):
        written(folder, "own_twin", width=width)
        (folder / "own_neighbour.py").write_text(f"PLACE = {folder.name!r}")
        (folder / "colorsys.py").write_text("raise AssertionError('the standard library is meant')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.chdir(working)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with serve(configuration(beside, "python:own_twin:build")) as live:
        (listed,) = (
            layer for layer in live.client.get("/models/own/layers").json()["layers"] if layer["name"] == "linear"
        )
        assert listed["outputs"][0]["shape"] == [1, 5]
    assert import_module("own_neighbour").PLACE == "installed"
    assert Path(import_module("colorsys").__file__ or "").parent not in (beside, working, installed)
