"""Tables for notebooks and terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LEFT = "text-align:left"


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of texts, every one of them escaped."""
    head = "".join(f'<th style="{LEFT}">{escape(header)}</th>' for header in headers)
    body = "".join(f"<tr>{''.join(_make_cell(cell) for cell in row)}</tr>" for row in rows)
    top = f'<caption style="{LEFT}">{escape(caption)}</caption>' if caption else ""
    return f"<table>{top}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _make_cell(text: str) -> str:
    return f'<td style="{LEFT};white-space:pre;font-family:monospace">{escape(text)}</td>'


def align(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Texts in columns, for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:>{width}}" if n in right else f"{cell:<{width}}" for n, (cell, width) in columns).rstrip()
        for columns in (enumerate(zip(row, widths, strict=True)) for row in rows)
    )
    return "\n".join(lines)
