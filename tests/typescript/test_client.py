"""A TypeScript client, generated of the document by tools from the registry, compiles under strict and extracts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server import serving
from tests.service.support import configured, picture, text64

FOLDER = Path(__file__).parent
FILES = ("package.json", "package-lock.json", ".npmrc", "tsconfig.json", "extract.ts")
LIMIT_S = 240


def run(*command: str, folder: Path) -> str:
    """What a command prints that ends well."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_client(tmp_path: Path) -> None:
    """Its extraction and its refusal are what any other client gets; what the document does not allow is no program."""
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]}")
    for name in FILES:
        shutil.copy(FOLDER / name, tmp_path)
    run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", folder=tmp_path)
    with serving(configured()) as live:
        (tmp_path / "openapi.json").write_bytes(live.client.get("/openapi.json").content)
        run("npm", "run", "generate", folder=tmp_path)
        run("npm", "run", "compile", folder=tmp_path)
        image = text64(picture(1))
        printed = json.loads(run("node", "out/extract.js", live.url, image, folder=tmp_path))
        body = {"layers": [{"layer": "pool", "pool": "flatten"}], "inputs": [{"image": image}]}
        reply = httpx.post(f"{live.url}/extract", json=body).json()
    assert printed["shape"] == [3, 32, 32]
    assert (printed["layer"], printed["pooled"]) == ("pool", "flatten")
    np.testing.assert_allclose(printed["data"], reply["features"]["pool"]["data"], rtol=1e-5, atol=1e-6)
    assert printed["refused"].startswith("did you mean ")


def test_lock_names_no_registry() -> None:
    """The lock has versions and hashes, and no address to get them from."""
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    locked = [each for name, each in packages.items() if name]
    assert locked
    assert all(each["version"] and each["integrity"].startswith("sha512-") for each in locked)
    assert not [each for each in locked if "resolved" in each]
