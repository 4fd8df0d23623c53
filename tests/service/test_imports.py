"""What a server imports before its first answer, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.marks import slow
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT
from tests.service.support import picture
from tests.service.test_starting import END_S, environment

# The libraries of models that nobody asked for, torch's compiler, and what only these need: more than all the rest.
LATER = {"torchvision", "timm", "transformers", "tokenizers", "torch._dynamo", "torch._inductor", "sympy", "triton"}
IMPORTED = re.compile(r"^import time:.*\| +([\w.]+)$", re.MULTILINE)


@pytest.mark.slow
def test_imports_before_the_first_answer(tmp_path: Path) -> None:
    """The embedded model answers with torch alone, though the configuration that comes with it lists torchvision's."""
    file = tmp_path / "stderr"
    words = [sys.executable, "-X", "importtime", "-m", "layertap", "serve", "--port", "0"]
    settings = environment(LAYERTAP_DRAIN_DELAY_S="0", LAYERTAP_API_KEY="a caller's")
    with file.open("wb") as stderr, subprocess.Popen(words, cwd=ROOT, env=settings, stderr=stderr) as running:
        try:
            wait_until(lambda: "listening on" in file.read_text() or running.poll() is not None)
            (url,) = re.findall(r"listening on (http://[\d.:]+)", file.read_text())
            wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            assert "resnet50" in httpx.get(f"{url}/models").text
            headers = {"content-type": "image/png"}
            reply = httpx.post(f"{url}/extract?layers=pool&pool=flatten", content=picture(), headers=headers)
            assert reply.status_code == 200, reply.text
        finally:
            running.terminate()
            running.wait(END_S)
    assert "LAYERTAP_API_KEYS sets its own" in file.read_text()
    imported = set(IMPORTED.findall(file.read_text()))
    assert {"torch", "fastapi", "PIL.Image"} <= imported
    assert not LATER & imported


NO_SOURCE = ("bulk", "nowhere", "--out", "out", "--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(("words", "status"), [(("serve", "--help"), 0), slow(NO_SOURCE, 2)])
def test_imports_of_a_command_that_runs_no_model(words: tuple[str, ...], status: int) -> None:
    """What needs no model is answered without torch, which takes seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "layertap", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    imported = set(IMPORTED.findall(done.stderr))
    assert done.returncode == status
    assert "typer" in imported
    assert not {"torch", "fastapi"} & imported
