"""Folders of pictures, and ``layertap`` as a command in this process or one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

COUNT = 70


def write_pictures(folder: Path, count: int, start: int = 0) -> None:
    """Small pictures of noise, some in a folder of their own, some JPEG."""
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        pixels = np.random.default_rng(number).integers(0, 256, (36, 40, 3), dtype=np.uint8)
        name = f"{number:05}.jpg" if number % 3 == 0 else f"sub/{number:05}.png"
        Image.fromarray(pixels).save(folder / name)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that nobody changes."""
    path = tmp_path_factory.mktemp("pictures")
    write_pictures(path, COUNT)
    return path


SMALL_PARTS = """
from layertap.service.bulk import pipeline
from layertap.service.cli.main import main

pipeline.PART_S = 0.05
main()
"""


def start(*words: str | Path, **environment: str) -> subprocess.Popen[bytes]:
    """``layertap`` as a process that writes parts often; without workers where nothing else is said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_PARTS, *map(str, words)],
        env={**kept, "LAYERTAP_WORKERS": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file."""
    return pq.read_table(path).to_pydict()


@pytest.fixture(autouse=True)
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process start none of their own, which takes a second."""
    monkeypatch.setenv("LAYERTAP_WORKERS", "0")
