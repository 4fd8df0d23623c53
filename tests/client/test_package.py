"""The client is a distribution of its own: small, typed, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2] / "client"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
LEFT_OUT = ("torch", "layertap", "PIL", "tqdm", "pydantic", "safetensors")
IMPORT = f"import sys, layertap_client; print({{m.split('.')[0] for m in sys.modules}} & {set(LEFT_OUT)!r})"


def test_wheel(tmp_path: Path) -> None:
    """The wheel holds all modules and the mark of types, and can be imported from where it was unpacked."""
    name = subprocess.check_output([sys.executable, "-c", BUILD, str(tmp_path)], cwd=ROOT, text=True).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "layertap_client").rglob("*.py")}
    assert expected | {"layertap_client/py.typed"} < names
    assert {each.split("/")[0].partition("-")[0] for each in names} == {"layertap_client"}
    code = "import layertap_client; print(layertap_client.__file__, layertap_client.__version__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.split() == [str(tmp_path / "site" / "layertap_client" / "__init__.py"), project["version"]]
    assert [each.partition(">")[0] for each in project["dependencies"]] == ["httpx", "numpy"]


def test_import() -> None:
    """Nothing but httpx and numpy is imported."""
    assert subprocess.check_output([sys.executable, "-c", IMPORT], text=True) == "set()\n"
