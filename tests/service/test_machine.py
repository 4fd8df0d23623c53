"""What a machine does to a running server: its disk is full, its clock jumps, files change under it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from layertap.models.digits import spec as digits
from layertap.models.spec import ModelSpec, WarmSpec
from layertap.service.config.configuration import Configuration
from tests import transformers_nets
from tests.nets import INPUTS
from tests.server import serving
from tests.service.fatal_models import Unhurried
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT, process
from tests.service.server_process import build_row_request, fatal_model_spec, send_when_accepted
from tests.service.support import ROW, Json, arrays_of, npy, picture, problem, raw, rows, same, tensor

CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.ctime", "datetime.now", "datetime.today", "date.today"}
TOLD = {  # nothing is decided by it
    "service/http/tracing.py",  # spans of several machines stand on one line of time
    "service/load/report.py",  # a report has its day
}
LATE_S = "0.2"
FULL = 2**16  # bytes that a file may have: the log fits, nothing compiled does
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


@pytest.mark.hard
def test_a_clock_that_jumps(tmp_path: Path, compiler: str) -> None:
    """Where the clock of the day jumps by hours at every look, all is as ever, deadlines too."""
    shim = tmp_path / "jumping.so"
    source = Path(__file__).with_name("jumping.c")
    subprocess.run([compiler, "-xc", "-shared", "-fPIC", str(source), "-o", str(shim), "-ldl"], check=True)
    with process([fatal_model_spec("Unhurried")], tmp_path, LD_PRELOAD=str(shim)) as server:
        stamps = {line["time"][:13] for line in server.logged()}
        assert len(stamps) > 1  # it does jump
        for _ in range(20):
            reply = send_when_accepted(build_row_request(server.url, "unhurried", **{"x-request-timeout": "20"}))
            assert reply is not None
            assert reply.status_code == 200
        many = raw(npy(rows(64)), "application/x-npy", layers="linear", model="unhurried")
        many["headers"] |= {"x-request-timeout": LATE_S}
        problem(httpx.post(f"{server.url}/extract", timeout=60, **many), 504, seconds=True)
        wait_until(lambda: not any(server.hooks().values()))
        assert server.end() == 0


@pytest.mark.hard
def test_a_full_disk(tmp_path: Path, compiler: str) -> None:
    """Where nothing can be written, what would be compiled runs with hooks, requests need no disk, nothing is left."""
    warm = WarmSpec(("conv", "head"), compile=True)
    spec = ModelSpec("chain", "python:tests.nets:Chain", "random:0", "cpu", inputs=INPUTS["Chain"], warm=(warm,))
    plans, inductor = tmp_path / "cache" / "plans", tmp_path / "inductor"
    variables = {"LAYERTAP_CACHE_DIR": str(plans.parent), "TORCHINDUCTOR_CACHE_DIR": str(inductor)}
    limit = ("prlimit", f"--fsize={FULL}")
    with process([spec, digits()], tmp_path, before=limit, **variables) as server:
        inputs = torch.ones(1, *INPUTS["Chain"][0].shape).numpy()
        big = raw(npy(inputs.repeat(128, 0)), "application/x-npy", layers="conv", model="chain")
        assert len(big["content"]) > FULL
        reply = httpx.post(f"{server.url}/extract", timeout=60, **big)
        assert "forward" not in reply.json()["receipts"]["conv"]
        files = {"images": picture(size=(300, 300))}
        assert len(files["images"]) > FULL
        query = {"model": "digits", "layers": "head"}
        assert httpx.post(f"{server.url}/extract", params=query, timeout=60, files=files).status_code == 200
        assert list(plans.glob("tmp*")) == []
        assert server.end() == 0
