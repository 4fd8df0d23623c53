"""What the README, the tutorial and the how-to pages print runs as printed, and gives what they show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.draw_pages import MAX_BYTES, find_pictures, list_differences
from tests.examples.printed import ROOT, Project, open_project, read_blocks, read_diffs
from tests.examples.test_examples import COMMANDS
from tests.marks import slow_but

README_LINES = 120
GUIDE = ROOT / "docs" / "guide.md"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if read_blocks(path) and not read_diffs(path) and path != GUIDE
]
QUICK = [path for path in PAGES if path.stem != "tutorial"]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One folder, and one server as long as documents start it in the same way."""
    with open_project(tmp_path_factory.mktemp("project")) as opened:
        yield opened


def run_document(path: Path, project: Project) -> None:
    """Run the shell blocks of a document in their order; each prints what the document shows after it.

    The scripts among the examples have tests of their own.
    """
    blocks = [block for block in read_blocks(path) if block.command.strip() not in COMMANDS]
    assert blocks
    for block in blocks:
        text = project.run(block.command)
        if block.output is not None:
            assert block.matches(text), f"{block.command}\n{text}"


@needs_curl
def test_readme(project: Project) -> None:
    """The README's two commands and five things to do run as printed; the picture it shows is what they draw."""
    project.run(".venv/bin/python examples/pictures.py out/pictures")
    run_document(ROOT / "README.md", project)
    pictures = find_pictures(ROOT / "README.md")
    assert pictures
    assert list_differences(pictures, project.path) == []
    with Image.open(project.path / "cam.png") as picture:
        assert picture.width > 2 * 288


@needs_curl
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_guide(project: Project) -> None:
    """The guide runs as printed, and each picture that it shows is what its command draws."""
    run_document(GUIDE, project)
    pictures = find_pictures(GUIDE)
    assert len(pictures) == 3
    assert list_differences(pictures, project.path) == []
    assert max(kept.stat().st_size for kept in pictures.values()) <= MAX_BYTES


@needs_curl
@pytest.mark.parametrize(
    "path", slow_but([path for path in PAGES if path.stem != "tutorial"], PAGES), ids=lambda path: path.stem
)
def test_document(path: Path, project: Project) -> None:
    """The shell blocks of a document run as printed."""
    run_document(path, project)


def test_readme_is_short() -> None:
    """The README keeps to what a person reads at once."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES
