"""What the how-to pages change in the code applies to the code as it is, and does there what they say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.printed import ROOT, open_project, read_blocks, read_diffs

COPIED = ("models", "service", "src", "tests")
PAGES = [path for path in sorted((ROOT / "docs" / "how-to").glob("*.md")) if read_diffs(path)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="needs git")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_change(page: Path, tmp_path: Path) -> None:
    """The diffs of a page apply to a copy of the project, and what the page runs then succeeds there."""
    with open_project(tmp_path) as project:
        for folder in COPIED:
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=left_out)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        for diff in read_diffs(page):
            subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, encoding="utf-8", check=True)
        for block in read_blocks(page):
            text = project.run(block.command)
            assert block.output is None or block.matches(text), text
