"""The tests of accelerators on a simulated one, in a process of their own: there ``auto`` is that device for all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.simdev.build import find_folder
from tests.service.load_server import ROOT

SHOWN = 6000  # characters of what the tests say
TESTS_S = 280


def test_on_a_simulated_accelerator() -> None:
    """All that is true of a GPU, but what only CUDA does, is true of a device whose streams compute when they like."""
    folder = find_folder()
    if not folder.exists():
        pytest.skip("`python -m tests.gpu.simdev.build` builds the simulated accelerator, as `make test-all` does")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-SHOWN:]
    assert " passed" in done.stdout
