"""What the README, the tutorial and the how-to pages print runs as printed, and gives what they show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.draw_pages import MAX_BYTES, find_pictures, list_differences
from tests.examples.printed import ROOT, Project, open_project, read_blocks, read_diffs
from tests.marks import slow_but

README_LINES = 120
GUIDE = ROOT / "docs" / "guide.md"
# Pages serve the tiny models too, and so write them.
EXAMPLES = "".join(b.command for b in read_blocks(ROOT / "examples" / "README.md") if "tiny" not in b.command)
TINY = "out/tiny"
# Those that serve the tiny models one after the other, and so all from one server.
PAGES = {
    path.stem: path
    for path in sorted((ROOT / "docs").rglob("*.md"), key=lambda path: (TINY in path.read_text("utf-8"), path))
    if read_blocks(path) and not read_diffs(path) and path != GUIDE
}
QUICK = ("explanations", "gradients", "interventions", "resume")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One folder, and one server as long as documents start it in the same way."""
    with open_project(tmp_path_factory.mktemp("project")) as opened:
        yield opened


def run_document(path: Path, project: Project) -> None:
    """Run the shell blocks of a document in their order; each prints what the document shows after it.

    What the examples' own README has as well is run by its tests; the tiny models are written once.
    """
    blocks = read_blocks(path)
    assert blocks
    for block in blocks:
        if block.command.endswith(TINY) and (project.path / TINY).exists():
            continue
        if block.command not in EXAMPLES or block.command.startswith("make serve"):
            text = project.run(block.command)
            if block.output is not None:
                assert block.matches(text), f"{block.command}\n{text}"


def test_readme(project: Project) -> None:
    """The README is short, its commands run as printed, and the picture it shows is what they draw."""
    page = ROOT / "README.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= README_LINES
    run_document(page, project)
    pictures = find_pictures(page)
    assert pictures
    assert list_differences(pictures, project.path) == []


@pytest.mark.slow
def test_guide(project: Project) -> None:
    """The guide runs as printed, and each picture that it shows is what its command draws."""
    run_document(GUIDE, project)
    pictures = find_pictures(GUIDE)
    assert len(pictures) == 3
    assert list_differences(pictures, project.path) == []
    assert max(kept.stat().st_size for kept in pictures.values()) <= MAX_BYTES


@pytest.mark.parametrize("page", slow_but(QUICK, PAGES))
def test_document(page: str, project: Project) -> None:
    """The shell blocks of a document run as printed."""
    run_document(PAGES[page], project)
