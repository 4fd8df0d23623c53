"""What the how-to pages change in the code applies to the code as it is, and does there what they say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.examples.printed import ROOT, open_project, read_blocks, read_diffs

COPIED = ("models", "service", "src", "tests")
PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "how-to").glob("*.md")) if read_diffs(path)}
IN_CI = "add-a-model-source"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def apply(page: str, folder: Path, *options: str) -> None:
    """Change a folder as a page says."""
    for diff in read_diffs(PAGES[page]):
        subprocess.run(["git", "apply", *options, "-"], cwd=folder, input=diff, encoding="utf-8", check=True)


@pytest.mark.parametrize("page", PAGES)
def test_applies(page: str) -> None:
    """The diffs of a page fit the code."""
    apply(page, ROOT, "--check")


def marked(page: str) -> Any:
    return pytest.param(page, marks=pytest.mark.slow if page == IN_CI else pytest.mark.hard)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_change(page: str, tmp_path: Path) -> None:
    """What a page runs succeeds in a copy of the project with its diffs."""
    with open_project(tmp_path, own_sources=True) as project:
        for folder in COPIED:
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=left_out)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        apply(page, tmp_path)
        for block in read_blocks(PAGES[page]):
            text = project.run(block.command)
            assert block.output is None or block.matches(text), text
