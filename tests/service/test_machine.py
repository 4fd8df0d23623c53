"""What a machine does to a running server: its disk is full, its clock jumps, files change under it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests import transformers_nets
from tests.server import serving
from tests.service.fatal_models import Unhurried
from tests.service.load_server import ROOT
from tests.service.support import ROW, Json, arrays_of, problem, same, tensor

CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.ctime", "datetime.now", "datetime.today", "date.today"}
TOLD = {  # nothing is decided by it
    "service/http/tracing.py",  # spans of several machines stand on one line of time
    "service/load/report.py",  # a report has its day
}
Saved = Callable[[Path], tuple[ModelSpec, Path]]


def _checkpoint(suffix: str, save: Callable[[dict[str, torch.Tensor], Path], None]) -> Saved:
    def saved(folder: Path) -> tuple[ModelSpec, Path]:
        file = folder / f"weights.{suffix}"
        save(Unhurried().state_dict(), file)
        source = "python:tests.service.fatal_models:Unhurried"
        return ModelSpec("kept", source, str(file), "cpu", inputs=(ROW,)), file

    return saved


def _directory(folder: Path) -> tuple[ModelSpec, Path]:
    transformers_nets.saved("vit", folder)
    return ModelSpec("kept", f"transformers:{folder}", device="cpu"), folder / "model.safetensors"


SAVED: dict[str, Saved] = {
    "safetensors": _checkpoint("safetensors", save_file),
    "pth": _checkpoint("pth", torch.save),
    "directory": _directory,
}


@pytest.mark.parametrize("kind", ["safetensors", "directory", pytest.param("pth", marks=pytest.mark.hard)])
def test_weights_that_change(tmp_path: Path, kind: str) -> None:
    """A loaded model has nothing to do with its file any more; one loaded from what the file is now is failed."""
    spec, file = SAVED[kind](tmp_path)
    with serving(Configuration((spec,), "kept")) as live:
        shape = live.client.get("/models/kept").json()["inputs"][0]["shape"]
        request: Json = {"json": {"layers": ["."], "inputs": [tensor(torch.ones(shape).numpy())], "encoding": "base64"}}
        before = live.client.post("/extract", **request)
        assert before.status_code == 200
        assert str(file) not in Path("/proc/self/maps").read_text()  # or this process would die of what comes now
        file.write_bytes(b"no weights")
        for _ in range(2):
            assert same(arrays_of(live.client.post("/extract", **request)), arrays_of(before))
        file.unlink()
        assert live.client.post("/extract", **request).content == before.content
    file.write_bytes(b"no weights")
    with serving(Configuration((replace(spec, required=False),), "kept")) as live:
        assert live.client.get("/models/kept").json()["state"] == "failed"
        assert str(tmp_path) not in str(problem(live.client.post("/extract", **request), 503, seconds=True))


@pytest.mark.parametrize("room", ["models", "service"])
def test_no_clock_of_the_day(room: str) -> None:
    """Nothing goes by the time of day: deadlines, patience and paces are on clocks that do not jump."""
    asked = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and ".".join(ast.unparse(node).split(".")[-2:]) in CLOCKS)
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    ]
    assert [each for each in asked if each.split(":")[0] not in TOLD] == []
