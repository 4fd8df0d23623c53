"""A client in forked processes, such as a data loader's workers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.client.forking import WAYS
from tests.server import Live


@pytest.fixture(scope="module")
def faults(live: Live) -> dict[str, list[str]]:
    """What went wrong in a program that forks: in this process, torch's threads would be forked too."""
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-m", "tests.client.forking", live.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_forks(faults: dict[str, list[str]], way: str) -> None:
    """Each process that a client is forked into gets its own answers, at its first attempt, and disturbs no other."""
    assert faults[way] == []
