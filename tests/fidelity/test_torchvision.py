"""Every classification architecture of torchvision: every module, every call, what goes in and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.cases import classifiers
from tests.fidelity.conftest import Noted
from tests.fidelity.served_model import Case, served_model


@pytest.mark.parametrize("case", classifiers())
def test_every_tensor(case: Case, tmp_path: Path, noted: Noted) -> None:
    """What comes over HTTP is what hooks with immediate copies saw offline: all of it, nothing else."""
    with served_model(case, tmp_path) as host:
        noted(host.check())
