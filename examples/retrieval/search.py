"""Search pictures by pictures: ``python examples/retrieval/search.py INDEX.parquet PICTURE…``.

INDEX.parquet is what ``layertap bulk`` wrote. Prints the nearest pictures, and writes a page that shows them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from index import Index
from page import make_page
from rich.console import Console
from vectors import RefusedError, VectorFile


def search(chosen: argparse.Namespace) -> None:
    """Find, print and draw."""
    for picture in chosen.pictures:
        if not picture.is_file() or "\n" in str(picture):  # a list of pictures has one a line
            raise RefusedError(f"there is no picture at {picture}")
    answered_by = {"--url": chosen.url, "--config": chosen.config}
    options = [word for name, value in answered_by.items() if value is not None for word in (name, value)]
    file = VectorFile.open(chosen.index, chosen.column, options)
    index = Index(file)
    with Console(stderr=True).status("embedding"):
        queries = file.embed(chosen.pictures)
    found = index.search(queries.vectors, chosen.count)
    for picture, hits in zip(chosen.pictures, found, strict=True):
        print(picture)
        for hit in hits:
            print(f"  {hit.cosine:.4f}  {hit.key}")
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    chosen.page.write_text(make_page(file, chosen.pictures, found), encoding="utf-8")
    print(f"{chosen.page} shows them among {len(index)} pictures")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Search pictures by pictures.")
    parser.add_argument("index", type=Path, help="a .parquet file of `layertap bulk`")
    parser.add_argument("pictures", type=Path, nargs="+", help="what to look for")
    parser.add_argument("--count", type=int, default=8, choices=range(1, 1001), metavar="N", help="how many to find")
    parser.add_argument("--column", help="the layer, where the file has several")
    parser.add_argument("--url", help="a server that embeds the pictures, in place of this machine")
    parser.add_argument("--config", help="the server's configuration file, where the model is in one")
    parser.add_argument("--page", type=Path, default=Path("out/search.html"), help="where the page goes")
    try:
        search(parser.parse_args())
    except RefusedError as error:
        raise SystemExit(f"refused: {error}") from None


if __name__ == "__main__":
    main()
