"""Devices that an entry names, looked at without torch: what its build and its plugins say about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "cuda: Optional[str] = {}\nhip: Optional[str] = {}\nxpu: Optional[str] = {}\n"
CHECK = """
import json, sys
from layertap.models.check import find_mistakes
from layertap.models.spec import ModelSpec
names = json.loads(sys.argv[1])
specs = [ModelSpec("a", "python:json:loads", **({"devices": (name,)} if name == "all" else {"device": name}))
         for name in names]
found = {names[place[0]]: error.detail for place, error in find_mistakes(dict(enumerate(specs)), ())}
assert "torch" not in sys.modules
print(json.dumps(found))
"""
NAMES = ("auto", "cpu", "cuda:1", "xpu", "all", "npu")
ABSENT = "there is no GPU on this machine"
UNKNOWN = "'npu' is no device"


@pytest.mark.parametrize(
    ("built", "has_plugin", "expected"),
    [
        (("None", "None", "None"), False, {"cuda:1": ABSENT, "xpu": ABSENT, "all": ABSENT, "npu": UNKNOWN}),
        (("None", "'7.1'", "None"), False, {"xpu": ABSENT, "npu": UNKNOWN}),
        (("None", "None", "'2025'"), False, {"cuda:1": ABSENT, "npu": UNKNOWN}),
        (("None", "None", "None"), True, {}),
    ],
    ids=["no accelerator", "ROCm", "Intel", "a plugin"],
)
def test_devices(built: tuple[str, ...], has_plugin: bool, expected: dict[str, str], tmp_path: Path) -> None:
    """Refused are devices that this build of torch certainly has not, and names that only a plugin could know."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(VERSION.format(*built))
    if has_plugin:
        plugin = tmp_path / "some-0.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text("[torch.backends]\nsome = some:autoload\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    words = [sys.executable, "-c", CHECK, json.dumps(NAMES)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == expected
