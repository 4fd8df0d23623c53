"""A page of what a search found, with the pictures in it: one file, without scripts."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from index import Hit
from PIL import Image, ImageOps
from vectors import VectorFile

SIDE = 160  # pixels of a picture on the page
STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
section { display: flex; gap: 1.5rem; border-top: 1px solid #8884; padding: 1.2rem 0 }
ol { display: flex; flex-wrap: wrap; gap: 1rem; list-style: none; margin: 0; padding: 0 }
figure { margin: 0; width: 8rem }
img, .none { width: 8rem; height: 8rem; object-fit: contain; background: #8882; border-radius: 4px }
img.small { image-rendering: pixelated }
.none { display: grid; place-items: center; color: #888 }
figcaption { overflow-wrap: anywhere; font-size: .85rem }
b { font-variant-numeric: tabular-nums }
code { overflow-wrap: anywhere }
"""


def make_page(file: VectorFile, queries: Sequence[Path], found: Sequence[Sequence[Hit]]) -> str:
    """An HTML document: each picture that was looked for, and beside it what was found for it."""
    sections = "".join(_make_section(file, query, hits) for query, hits in zip(queries, found, strict=True))
    what = f"{file.column} of {file.model}, fingerprint {file.fingerprint}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(file.path.name)}</title>'
        f"<style>{STYLE}</style><h1>{escape(file.path.name)}</h1><p><code>{escape(what)}</code></p>{sections}</html>\n"
    )


def _make_section(file: VectorFile, query: Path, hits: Sequence[Hit]) -> str:
    items = "".join(f"<li>{_make_figure(file.find_picture(hit.key), hit.key, hit.cosine)}</li>" for hit in hits)
    return f"<section>{_make_figure(query, query.name)}<ol>{items}</ol></section>"


def _make_figure(path: Path | None, name: str, cosine: float | None = None) -> str:
    shown = "" if cosine is None else f"<b>{cosine:.3f}</b> "
    return f"<figure>{_make_picture(path, name)}<figcaption>{shown}{escape(name)}</figcaption></figure>"


def _make_picture(path: Path | None, name: str) -> str:
    try:
        if path is None:
            raise FileNotFoundError
        with Image.open(path) as image:
            small = ' class="small"' if max(image.size) < SIDE else ""
            thumbnail = ImageOps.exif_transpose(image).convert("RGB")
            thumbnail.thumbnail((SIDE, SIDE))
    except (OSError, ValueError, Image.DecompressionBombError):
        return '<div class="none">no picture</div>'
    stream = io.BytesIO()
    thumbnail.save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img{small} alt="{escape(name)}" src="data:image/png;base64,{data}">'
