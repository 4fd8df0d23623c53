"""What tests of ends and faults share: models that bring a process down, and the processes below one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from layertap.models.spec import ModelSpec
from tests.service.support import ROW


def fatal_model_spec(factory: str, **fields: Any) -> ModelSpec:
    """The entry of a model of ``fatal_models``."""
    source = f"python:tests.service.fatal_models:{factory}"
    chosen = {"weights": "random:0", "device": "cpu", **fields}
    return ModelSpec(factory.lower(), source, inputs=(ROW,), **chosen)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = _list_children(pid)
    return [*children, *(each for child in children for each in descendants(child))]


def _list_children(pid: int) -> list[int]:
    """The children of a process's threads; none of what has ended meanwhile."""
    children = list[int]()
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return children
