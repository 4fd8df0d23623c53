"""What is imported is ``layertap``: packages of a user's own called ``models`` and ``service`` stay theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NETS = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))\n"
CONFIG = """
models:
  - name: own
    source: python:models.nets:build
    weights: random:0
    device: cpu
    inputs: [{name: x, shape: [4]}]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder as research repositories have it, with packages ``models`` and ``service``."""
    for package, text in (("models", NETS), ("service", "raise ImportError('not the one that was meant')\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("" if package == "models" else text)
        (tmp_path / package / "nets.py").write_text(text)
    (tmp_path / "layertap.yaml").write_text(CONFIG)
    return tmp_path


def run(folder: Path, *words: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_own_packages(repository: Path) -> None:
    """A factory in a package called ``models``, on the path as most repositories have it, serves."""
    done = run(repository, "-m", "layertap", "layers", "own", "--config", "layertap.yaml", path=".")
    assert done.returncode == 0, done.stderr
    assert "Linear" in done.stdout


def test_one_name(repository: Path) -> None:
    """Nothing imports a package by the name of a folder."""
    code = "import sys, layertap.service.cli.main; print(*sys.modules)"
    names = {name.split(".")[0] for name in run(repository, "-c", code, path=".").stdout.split()}
    assert names > {"layertap"}
    assert not names & {"models", "service"}


def test_checkout_without_links(tmp_path: Path) -> None:
    """Where git writes a file in place of each link, the import says what to do."""
    (tmp_path / "layertap").mkdir()
    for name in ("__init__.py", "models", "service"):
        source = ROOT / "src" / "layertap" / name
        (tmp_path / "layertap" / name).write_text(str(source.readlink()) if source.is_symlink() else source.read_text())
    done = run(tmp_path, "-c", "import layertap.service", path=str(tmp_path))
    assert "git config core.symlinks true" in done.stderr.splitlines()[-1]


def test_wheel(tmp_path: Path, repository: Path) -> None:
    """The wheel holds all there is of both folders under that name, and nothing under another one."""
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    name = subprocess.check_output([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, text=True).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    folders = [path for room in ("models", "service") for path in (ROOT / room).rglob("*.py")]
    assert {f"layertap/{path.relative_to(ROOT).as_posix()}" for path in folders} < names
    assert {"layertap/models/digits/digits.safetensors", "layertap/models/compiled/runner.cpp"} < names
    pages = [path for path in (ROOT / "service" / "ui").iterdir() if path.suffix in (".html", ".css", ".js", ".png")]
    load = ROOT / "service" / "load"
    pages += load.glob("scenarios/*.yaml")
    assert {f"layertap/{path.relative_to(ROOT).as_posix()}" for path in pages} < names
    assert {each.split("/")[0].partition("-")[0] for each in names} == {"layertap"}
    code = "import layertap.service.cli.main as main; print(main.__file__)"
    done = run(repository, "-c", code, path=f"{tmp_path / 'site'}:.")
    assert done.stdout.strip() == str(tmp_path / "site" / "layertap" / "service" / "cli" / "main.py"), done.stderr
