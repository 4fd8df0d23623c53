"""Configuration files of tests."""

from __future__ import annotations

from pathlib import Path

MODEL = "models: [{{name: a, source: 'python:m:f', {}}}]"


def write_config(folder: Path, text: str, name: str = "models.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file
