"""Draws the pictures of documents anew, by the commands that the pages print: ``python -m tests.examples.draw_pages``.

What a page shows, and a command of the page writes under the same name, is what that command draws.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from tests.examples.printed import ROOT, SERVE, Project, open_project, read_blocks

PAGES = (ROOT / "README.md", ROOT / "docs" / "guide.md")
SHOWN = re.compile(r"!\[[^\]]*\]\(([^()\s]+\.png)\)")
MAX_BYTES = 150_000
COLOURS = (256, 128, 64, 32)


def find_pictures(page: Path) -> dict[str, Path]:
    """The files that a page shows and its commands write, by the names that these give them."""
    text = "\n".join(block.command for block in read_blocks(page))
    shown = [page.parent / target for target in SHOWN.findall(page.read_text(encoding="utf-8"))]
    return {file.name: file for file in shown if _writes(text, file.name)}


def draw(page: Path, project: Project) -> None:
    """Run what starts a server for a page, and what writes pictures that it shows, into the project's folder."""
    names = find_pictures(page)
    for block in read_blocks(page):
        if SERVE.fullmatch(block.command) or any(_writes(block.command, name) for name in names):
            project.run(block.command)


def compare(drawn: Path, kept: Path) -> str:
    """How a picture that was drawn differs from the one that is kept; nothing where it does not.

    Kept are at most 256 colours, and bits depend on the machine.
    """
    with Image.open(drawn) as one, Image.open(kept) as other:
        if one.size != other.size:
            return f"{kept.name}: {other.size} is kept, {one.size} is drawn"
        pair = [np.asarray(each.convert("RGB"), int) for each in (one, other)]
    apart = np.abs(pair[0] - pair[1]).mean()
    return f"{kept.name}: {apart:.1f} of 255 apart" if apart >= 3 else ""


def list_differences(pictures: Mapping[str, Path], folder: Path) -> list[str]:
    """What differs of all pictures of a page."""
    return list(filter(None, (compare(folder / name, kept) for name, kept in pictures.items())))


def keep(drawn: Path, kept: Path) -> None:
    """Write a picture in as many colours as it may have within the limit."""
    with Image.open(drawn) as picture:
        for colours in COLOURS:
            stream = BytesIO()
            method = Image.Quantize.MAXCOVERAGE  # median cut makes bands of a colour scale
            reduced = picture.convert("RGB").quantize(colours, method, kmeans=2, dither=Image.Dither.NONE)
            reduced.save(stream, "PNG", optimize=True)
            if len(stream.getvalue()) <= MAX_BYTES:
                break
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(stream.getvalue())


def _writes(command: str, name: str) -> bool:
    return re.search(rf"(?:-o|--out) {re.escape(name)}(?!\S)", command) is not None


def main() -> None:
    """Draw all pictures of all pages; those that are as they were stay."""
    with TemporaryDirectory() as folder, open_project(Path(folder) / "project") as project:
        for page in PAGES:
            draw(page, project)
            for name, kept in find_pictures(page).items():
                new = not kept.exists() or bool(compare(project.path / name, kept))
                if new:
                    keep(project.path / name, kept)
                sys.stdout.write(f"{kept.relative_to(ROOT)}: {'drawn anew' if new else 'as it was'}\n")


if __name__ == "__main__":
    main()
