"""Both distributions: a user's own packages ``models`` and ``service`` stay theirs, and the client needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import layertap_client

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


UI, LOAD = ROOT / "service" / "ui", ROOT / "service" / "load" / "scenarios"
DATA = [
    *("models/digits/digits.safetensors", "models/compiled/runner.cpp"),
    *(path.relative_to(ROOT).as_posix() for suffix in ("html", "css", "js", "png") for path in UI.glob(f"*.{suffix}")),
    *(path.relative_to(ROOT).as_posix() for path in LOAD.glob("*.yaml")),
]


@pytest.mark.parametrize(
    ("project", "module", "folders", "data"),
    [
        (ROOT, "layertap.service.cli.main", ("models", "service"), [f"layertap/{name}" for name in DATA]),
        (ROOT / "client", "layertap_client", ("layertap_client",), ["layertap_client/py.typed"]),
    ],
    ids=["server", "client"],
)
def test_wheel(
    tmp_path: Path, repository: Path, project: Path, module: str, folders: tuple[str, ...], data: list[str]
) -> None:
    """A wheel holds all modules, nothing under another name, and is imported from where it was unpacked."""
    package = module.partition(".")[0]
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    name = subprocess.check_output([sys.executable, "-c", build, str(tmp_path)], cwd=project, text=True).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    paths = [path.relative_to(project).as_posix() for each in folders for path in (project / each).rglob("*.py")]
    assert {path if path.startswith(package) else f"{package}/{path}" for path in paths} | set(data) < names
    assert {each.split("/")[0].partition("-")[0] for each in names} == {package}
    code = f"import {module} as module; print(module.__file__)"
    done = run(repository, "-c", code, path=f"{tmp_path / 'site'}:.")
    assert done.stdout.startswith(str(tmp_path / "site" / package)), done.stderr


LEFT_OUT = {"torch", "layertap", "PIL", "tqdm", "pydantic", "safetensors"}


def test_client_needs_little() -> None:
    """Nothing but httpx and numpy is named by the client, or imported with it."""
    project = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    assert [each.partition(">")[0] for each in project["dependencies"]] == ["httpx", "numpy"]
    assert layertap_client.__version__ == project["version"]
    code = f"import sys, layertap_client; print({{m.split('.')[0] for m in sys.modules}} & {LEFT_OUT!r})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
