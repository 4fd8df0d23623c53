"""``bench.calls``: the road of a warm request does not get longer unnoticed.

``calls.json`` is what ``python -m bench.calls --out tests/bench/calls.json`` wrote; write it anew where a road got
shorter, or longer for a reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow

ROOT = Path(__file__).parents[2]
STORED = json.loads(Path(__file__).with_name("calls.json").read_text())
GROWTH = 1.05
COUNTED_ON = (3, 11)
LIBRARIES = ("anyio", "fastapi", "httptools", "orjson", "prometheus_client", "pydantic", "starlette", "uvicorn")


def find_other_versions() -> list[str]:
    """Libraries whose functions are on the road and that are not those of the lock."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE))
    wanted = {name: locked[name.replace("_", "-")] for name in LIBRARIES}
    return [name for name, locked_version in wanted.items() if get_version(name) != locked_version]


def get_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def count(kinds: Iterable[str], out: Path) -> dict[str, Any]:
    """Today's counts, of a process of their own: pytest adds its handlers to every logger."""
    if sys.version_info[:2] != COUNTED_ON:
        pytest.skip("calls were counted on another Python")
    if others := find_other_versions():
        pytest.skip(f"calls were counted with other versions of {', '.join(others)}")
    words = [word for kind in kinds for word in ("--kind", kind)]
    subprocess.run([sys.executable, "-m", "bench.calls", *words, "--out", str(out)], cwd=ROOT, check=True, timeout=240)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kinds", [STORED.keys() - {"text"}, slow({"text"})])
def test_road_is_no_longer(kinds: set[str], tmp_path: Path) -> None:
    """At most 5 % more Python calls than stored, and no more files of ours; what is new is told."""
    for kind, found in count(kinds, tmp_path / "calls.json").items():
        stored = STORED[kind]
        grown = found["python"] > GROWTH * stored["python"] or found["files"] > GROWTH * stored["files"]
        assert not grown, "\n".join(
            [
                f"{kind}: {found['python']} Python calls in {found['files']} files of ours, "
                f"{stored['python']} in {stored['files']} stored; new or called more often:",
                *list_new(count_functions(stored), count_functions(found)),
            ]
        )


def list_new(stored: dict[str, int], found: dict[str, int]) -> list[str]:
    """Functions that are called more often than stored, those with the most calls more first."""
    more = {name: calls - stored.get(name, 0) for name, calls in found.items()}
    return [f"{calls:+4} {name}" for name, calls in sorted(more.items(), key=lambda each: -each[1]) if calls > 0]


def count_functions(counts: dict[str, Any]) -> dict[str, int]:
    """Calls by file and function."""
    return {
        f"{file}: {function}": int(calls)
        for file, functions in counts["functions"].items()
        for function, calls in (entry.rsplit(" ", 1) for entry in functions.split(", "))
    }


def test_what_is_new_is_told() -> None:
    """A new function, and one that is called more often."""
    stored = count_functions({"functions": {"a.py": "f 2, C.g 1", "b.py": "h 3"}})
    found = count_functions({"functions": {"a.py": "f 4, C.g 1, k.<locals>.<genexpr> 5", "b.py": "h 1"}})
    assert list_new(stored, found) == ["  +5 a.py: k.<locals>.<genexpr>", "  +2 a.py: f"]
