"""The script by which an index without probes is found to be still good, as the document prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.server import Live
from tests.service.load_server import ROOT
from tests.service.support import picture

DOCUMENT = ROOT / "docs" / "how-to" / "lasting-indexes.md"


@pytest.mark.parametrize(("share", "says"), [(0.0, "still good"), (1e-3, "make it anew")])
def test_sample(live: Live, tmp_path: Path, share: float, says: str) -> None:
    """An index that the server would make again is good, one that moved is not."""
    files = [tmp_path / f"{number}.png" for number in range(30)]
    for number, file in enumerate(files):
        file.write_bytes(picture(number))
    parts = [("images", file.read_bytes()) for file in files]
    reply = live.client.post("/extract", files=parts, params={"layers": "block3", "pool": "mean"}).json()
    vectors = np.asarray(reply["features"]["block3"]["data"], np.float32)
    np.savez(tmp_path / "index.npz", files=np.array([str(file) for file in files]), block3=vectors * (1 + share))
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    words = [live.url, str(tmp_path / "index.npz"), "block3", "mean"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith(says), done.stdout
