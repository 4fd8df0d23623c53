"""``explain``: the same maps as over HTTP, the best classes named, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer.main

from layertap.service.cli.main import app
from layertap.service.schemas.bodies import DrawnBody, ExplainBody
from tests.server import Live
from tests.service.cli.commands import Command


@pytest.mark.parametrize(("form", "remote"), [("npz", False), ("npz", True), ("npy", False)])
def test_explain(command: Command, live: Live, pictures: list[Path], tmp_path: Path, form: str, remote: bool) -> None:
    """``explain`` writes the very bytes that a server answers with."""
    methods, classes = ("saliency", "3") if form == "npy" else ("saliency,grad_cam", "top,3")
    file, where = tmp_path / f"out.{form}", ("--url", live.url) * remote
    done = command("explain", pictures[0], "--method", methods, "--classes", classes, "--out", file, *where)
    assert (done.status, done.out) == (0, "")
    query = {"method": methods, "classes": classes, "format": form}
    files = [("images", pictures[0].read_bytes())]
    reply = live.client.post("/explain", files=files, params=query)
    assert reply.status_code == 200
    assert file.read_bytes() == reply.content
    assert reply.headers["x-layertap-fingerprint"] in done.notes
    assert done.notes.count("class ") == 5


OPTIONS = {
    "smoothgrad": {"samples": "3", "noise": "0.2", "seed": "7", "top_classes": "2", "objective": "probability"},
    "occlusion": {"window": "16", "stride": "16", "classes": "3"},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_options(command: Command, live: Live, pictures: list[Path], tmp_path: Path, method: str) -> None:
    """Each field of the body has an option of its name, and does the same."""
    file, options = tmp_path / "out.json", OPTIONS[method]
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = command("explain", pictures[0], "--method", method, *words, "--out", file)
    assert done.status == 0
    query = {"method": method, "format": "json", **options}
    reply = live.client.post("/explain", files=[("images", pictures[0].read_bytes())], params=query)
    assert reply.status_code == 200
    found, wanted = json.loads(file.read_text()), reply.json()
    assert found["fingerprint"] == wanted["fingerprint"]
    for key in wanted["features"]:  # changed inputs share forwards as it happens: bits differ
        np.testing.assert_allclose(found["features"][key]["data"], wanted["features"][key]["data"], atol=1e-4)
    assert done.notes.count("class ") == int(options.get("top_classes", 5))


def test_every_field_has_an_option() -> None:
    """What is special to explanations can be said on the command line."""
    special = ExplainBody.model_fields.keys() - DrawnBody.model_fields.keys()
    parameters = typer.main.get_command(app).commands["explain"].params  # type: ignore[attr-defined]
    named = {option for each in parameters for option in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in special} <= named
