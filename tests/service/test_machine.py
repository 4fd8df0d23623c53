"""What a machine does to a running server: its disk is full, its clock jumps, files change under it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests import transformers_nets
from tests.marks import slow
from tests.server import serving
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT
from tests.service.nets_http import Touchy
from tests.service.support import Json, arrays_of, net, problem, same, tensor

CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.ctime", "datetime.now", "datetime.today", "date.today"}
CLOCK = re.compile(r"\b(date)?time\b")  # what has none of it is not parsed
TOLD = {  # nothing is decided by it
    "service/http/tracing.py",  # spans of several machines stand on one line of time
    "models/run/row_check.py",  # since when rows of a model are known to cross
}


@pytest.mark.parametrize("kind", ["safetensors", slow("directory")])
def test_weights_that_change(tmp_path: Path, kind: str) -> None:
    """A loaded model has nothing to do with its file any more; one loaded from what the file is now is failed."""
    file = tmp_path / "model.safetensors"
    if kind == "directory":
        transformers_nets.saved("vit", tmp_path)
        spec = ModelSpec("kept", f"transformers:{tmp_path}", device="cpu")
    else:
        spec = net("kept", "Touchy", weights=str(file))
        save_file(Touchy().state_dict(), file)
    with serving(Configuration((spec,), "kept")) as live:
        shape = live.client.get("/models/kept").json()["inputs"][0]["shape"]
        request: Json = {"json": {"layers": ["."], "inputs": [tensor(torch.ones(shape).numpy())], "encoding": "base64"}}
        before = live.client.post("/extract", **request)
        assert before.status_code == 200
        assert str(file) not in Path("/proc/self/maps").read_text()  # or this process would die of what comes now
        file.write_bytes(b"no weights")
        assert same(arrays_of(live.client.post("/extract", **request)), arrays_of(before))
        file.unlink()
        assert live.client.post("/extract", **request).content == before.content
    file.write_bytes(b"no weights")
    with serving(Configuration((spec,), "kept"), wait=False) as live:
        wait_until(lambda: live.client.get("/models/kept").json()["state"] == "failed")
        assert str(tmp_path) not in str(problem(live.client.post("/extract", **request), 503))


def test_no_clock_of_the_day() -> None:
    """Nothing goes by the time of day: deadlines, patience and paces are on clocks that do not jump."""
    asked = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for room in ("models", "service")
        for file in sorted((ROOT / room).rglob("*.py"))
        if CLOCK.search(file.read_text())
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and ".".join(ast.unparse(node).split(".")[-2:]) in CLOCKS)
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    ]
    assert [each for each in asked if each.split(":")[0] not in TOLD] == []
