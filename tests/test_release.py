"""What a release is: sdists, wheels built of them, installed where nothing else is, and the first request answered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PICTURE = ROOT / "examples" / "digit.png"
ASK = """
import sys
from layertap_client import Client, RetryPolicy
with Client(sys.argv[1], model="digits", retries=RetryPolicy(patience_s=120)) as client:  # the server may start yet
    result = client.extract([sys.argv[2]], ["pool"])
    print("torch" in sys.modules, result["pool"].shape, result.fingerprint)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BIN / "uv").exists(), reason="needs uv beside Python, as make setup installs it"),
]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAYERTAP_"))}


def run(*words: str | Path) -> str:
    """What a command prints; nothing of this environment is on its path."""
    done = subprocess.run(words, env=ENVIRONMENT, cwd=os.sep, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by their distributions, each built of an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    words = (BIN / "uv", "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    for project in (ROOT, ROOT / "client"):
        run(*words, project)
    assert len(list(folder.glob("*.tar.gz"))) == 2
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def install(folder: Path, *wheels: Path) -> Path:
    """An environment with wheels and what they need, in the locked versions; the folder of its commands."""
    run(BIN / "uv", "venv", "--quiet", "--python", sys.executable, folder)
    words = ("pip", "install", "--quiet", "--python", folder / "bin" / "python")
    run(BIN / "uv", *words, "--constraint", ROOT / "requirements.lock", *wheels)
    return folder / "bin"


def test_versions(wheels: dict[str, Path]) -> None:
    """Server and client are released together, under one version, and the one needs the other of that version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {name: path.name.split("-")[1] for name, path in wheels.items()} == dict.fromkeys(
        ("layertap", "layertap_client"), project["version"]
    )
    assert f"layertap-client=={project['version']}" in project["dependencies"]


@pytest.mark.hard
def test_bare_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    """A server installed from its wheel answers a client installed from its own, which has no torch."""
    server = install(tmp_path / "server", *wheels.values())
    client = install(tmp_path / "client", wheels["layertap_client"])
    version = wheels["layertap"].name.split("-")[1]
    assert run(server / "layertap", "--version").split()[-1] == version
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    words = [server / "layertap", "serve", "--port", port]
    with subprocess.Popen(words, env=ENVIRONMENT | {"LAYERTAP_CACHE_DIR": str(tmp_path)}, cwd=tmp_path) as running:
        try:
            told = run(client / "python", "-c", ASK, f"http://127.0.0.1:{port}", PICTURE).split(maxsplit=1)
        finally:
            running.kill()
    assert told[0] == "False"
    assert told[1].startswith("(1, 64")
