"""The names behind the counts of `docs/explanation/fidelity.md`, a file in ``results/`` for each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).with_name("results")


def write_names(table: str, names: Mapping[str, Iterable[str]]) -> None:
    """Write a line ``NAME,OUTCOME`` for each name of each outcome, sorted by name."""
    lines = sorted(f"{name},{outcome}\n" for outcome, found in names.items() for name in found)
    (FOLDER / f"{table}.csv").write_text("".join(lines), encoding="utf-8")
