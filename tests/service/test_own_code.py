"""Factories that an operator wrote: where they are found, and what is told of their errors, to whom."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import numpy as np
import pytest

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.config.file import ConfigError
from layertap.service.logs import JsonFormatter
from tests.service.conftest import Serve
from tests.service.load_server import ROOT, process
from tests.service.support import Json, npy, problem, raw, rows

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
FORWARDS = {
    "name": ("y = undefined_name", "NameError"),
    "attribute": ("self.lniear(x)", "AttributeError"),
    "division": ("1 / 0", "ZeroDivisionError"),
    "value": ("raise ValueError('secret of the operator')", "ValueError"),
    "shape": ("self.linear(x[:, :3])", "RuntimeError"),
}
FACTORIES = {
    "value": ("raise ValueError('secret of the operator')", "ValueError"),
    "file": ("open('/secret/path')", "FileNotFoundError"),
    "arguments": ("Net(5)", "TypeError"),
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


def told(caplog: pytest.LogCaptureFixture) -> list[Json]:
    return [
        json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name.startswith("layertap")
    ]


def shown_failure(serve: Serve, found: Configuration) -> tuple[str, str]:
    """What clients are told of a model that can't be loaded: in the list, and where they ask it."""
    with serve(found) as live:
        reply = live.client.post("/extract", **raw(npy(rows()), "application/x-npy", layers="linear"))
        said = problem(reply, 503, seconds=True)
        reason = live.client.get("/models/own").json()["reason"]
        assert "secret" not in reason + str(said)
        assert "/" not in reason
        return reason, str(said)


@pytest.mark.parametrize("kind", FACTORIES)
def test_factory_that_raises(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """The log has the traceback of a factory's error; clients hear its class, and that it is the model's own code."""
    code, name = FACTORIES[kind]
    file = written(tmp_path, f"own_factory_{kind}", built=code)
    for shown in shown_failure(serve, configuration(tmp_path, f"python:{file.stem}:build", required=False)):
        assert name in shown
        assert "own code" in shown
        assert "log" in shown
    (line,) = [line for line in told(caplog) if line["message"] == "a model could not be loaded"]
    assert f'{file}", line' in line["exception"]
    assert code in line["exception"]


@pytest.mark.parametrize("kind", FORWARDS)
def test_forward_that_raises(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A bug in a forward is told as such, and as a wrong shape only where it may be one."""
    code, name = FORWARDS[kind]
    file = written(tmp_path, f"own_forward_{kind}", first=code)
    for shown in shown_failure(serve, configuration(tmp_path, f"python:{file.stem}:build", required=False)):
        assert f"own forward raised {name}" in shown
        assert ("can't take an input of this shape" in shown) == (kind in ("shape", "value"))
    (line,) = [line for line in told(caplog) if line["message"] == "a model could not be loaded"]
    assert re.search(rf"\n{name}: .*\n  {re.escape(str(file))}, line \d+: {re.escape(code)}", line["exception"])
    assert f'{file}", line' in line["exception"]
    assert code in line["exception"]


def test_forward_that_raises_at_another_shape(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a forward raises for a request alone is told to it without a word of the error, and to the log in full."""
    caplog.set_level("INFO", "layertap")
    file = written(tmp_path, "own_shapes", first="x = x.mean((2, 3)) if x.shape[2] == 8 else x.secret")
    inputs = [{"name": "x", "shape": [4, 8, 8]}]
    with serve(configuration(tmp_path, "python:own_shapes:build", inputs=inputs)) as live:
        good, wide = (
            raw(npy(np.ones((4, size, size), np.float32)), "application/x-npy", layers=".") for size in (8, 9)
        )
        assert live.client.post("/extract", **good).status_code == 200
        said = problem(live.client.post("/extract", **wide), 422)
        assert "own forward raised AttributeError" in said["detail"]
        assert "secret" not in str(said)
    assert f'{file}", line' in caplog.text  # as it was when it was logged
    assert "x.secret" in caplog.text


@pytest.mark.parametrize("place", ["beside", "working"])
def test_found(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A factory's module is found beside the configuration and in the working directory, and what it imports too."""
    for folder in ("beside", "working"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "working")
    package = tmp_path / place / f"own_{place}"
    written(package, "nets")
    (package / "__init__.py").write_text(f"import own_helper_{place}")
    (tmp_path / place / f"own_helper_{place}.py").touch()
    with serve(configuration(tmp_path / "beside", f"python:own_{place}.nets:build")) as live:
        assert live.client.get("/models/own").json()["state"] == "ready"


def test_file(serve: Serve, tmp_path: Path) -> None:
    """A factory may be named by its file, beside the configuration: two of one name, and none hides another module."""
    for width, folder in enumerate(("one", "other"), 5):
        file = written(tmp_path / "code" / folder, "models", built="import own_in_folder", width=width)
        (file.parent / "own_in_folder.py").touch()
    for width, folder in enumerate(("one", "other"), 5):
        with serve(configuration(tmp_path, f"python:code/{folder}/models.py:build")) as live:
            told = live.client.get("/models/own").json()
            assert (told["state"], told["source"]) == ("ready", "python:models:build")
            layers = live.client.get("/models/own/layers").json()["layers"]
            (listed,) = (layer for layer in layers if layer["name"] == "linear")
            assert listed["outputs"][0]["shape"] == [1, width]
    assert not hasattr(sys.modules.get("models"), "Net")


def test_file_that_fails(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the file and line of what it raises; clients hear neither, and a file that is not there is named."""
    file = written(tmp_path, "own_failing", built="raise ValueError('secret of the operator')")
    for shown in shown_failure(serve, configuration(tmp_path, "python:own_failing.py:build", required=False)):
        assert "'own_failing:build'" in shown
    assert f'{file}", line 14' in told(caplog)[-1]["exception"]
    with pytest.raises(ConfigError, match=r"there is no file .*own_absent\.py"):
        configuration(tmp_path, "python:own_absent.py:build")


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


def test_not_found(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a module was looked for stands in the log, and in no reply."""
    written(tmp_path, "own_importer", built="import own_nowhere")
    for shown in shown_failure(serve, configuration(tmp_path, "python:own_importer:build", required=False)):
        assert "ModuleNotFoundError" in shown
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    for shown in shown_failure(serve, configuration(tmp_path, "python:own_package.nets:build", required=False)):
        assert "there is no Python module 'own_package.nets'" in shown
        assert str(tmp_path) not in shown
    assert f"looked in {tmp_path}" in told(caplog)[-1]["exception"]


def test_forward_that_raises_for_some(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a forward raises at a request is told as the model's, with its class; the log has the place."""
    file = written(tmp_path, "own_moody", first="if x.max() > 100: raise KeyError('secret of the operator')")
    with serve(configuration(tmp_path, "python:own_moody:build")) as live:
        good, bad = (raw(npy(rows() * 0 + number), "application/x-npy", layers="linear") for number in (1, 200))
        said = problem(live.client.post("/extract", **bad), 500)
        assert live.client.post("/extract", **good).status_code == 200
    assert said["type"].endswith(":model-raised")
    assert "KeyError" in said["detail"]
    assert "secret" not in str(said)
    assert f'{file}", line' in caplog.text  # as it was when it was logged
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["a model's forward raised"]


def test_hidden_by_another(serve: Serve, tmp_path: Path) -> None:
    """Where a package of that name is imported already, the refusal says so."""
    written(tmp_path / "yaml", "nets")
    (tmp_path / "yaml" / "__init__.py").touch()
    for shown in shown_failure(serve, configuration(tmp_path, "python:yaml.nets:build", required=False)):
        assert "'yaml' that is installed comes before yours" in shown


def test_no_factory(tmp_path: Path) -> None:
    """A source without a factory's name is refused before anything is loaded."""
    written(tmp_path, "own_nameless")
    with pytest.raises(ConfigError, match="needs a module and a factory"):
        configuration(tmp_path, "python:own_nameless")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_packages_of_every_name(tmp_path: Path, workers: str) -> None:
    """One's own packages ``models`` and ``service`` are imported as they are, by a server and by its workers."""
    written(tmp_path / "models", "net", built="from models.errors import NoNet; from service import WIDTH", width=7)
    (tmp_path / "models" / "__init__.py").write_text("from models.errors import NoNet\n")
    (tmp_path / "models" / "errors.py").write_text("class NoNet(Exception): ...\n")
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("WIDTH = 7\n")
    spec = ModelSpec("own", "python:models.net:build", "random:0", device="cpu", inputs=(InputSpec("x", (4,)),))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with process([spec], tmp_path, PYTHONPATH=path, LAYERTAP_WORKERS=workers) as server:
        told = httpx.get(f"{server.url}/models/own").json()
        assert (told["state"], told["source"]) == ("ready", "python:models.net:build")
        request = raw(npy(np.ones(4, np.float32)), "application/x-npy", layers="linear")
        reply = httpx.post(f"{server.url}/extract", **request)
        assert reply.json()["features"]["linear"]["shape"] == [1, 7]
