"""The figures of fidelity runs as tables for `docs/explanation/fidelity.md`.

``python -m tests.fidelity.table REPORT.xml …``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

Row = tuple[str, ...]
FIELDS = ("layers", "tensors", "identical", "deviation")
TITLES = (
    *("models", "architectures", "modules that run", "tensors compared", "bit for bit equal"),
    "largest relative deviation",
)
GROUPS = {
    "tests.fidelity.test_torchvision": "torchvision, classification",
    "tests.fidelity.test_structured": "torchvision, segmentation and video",
    "tests.fidelity.test_timm": "timm",
}


def rows(reports: Iterable[Path]) -> dict[str, dict[str, Row]]:
    """Group and architecture to the figures of each test that passed; later reports count more than earlier ones."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            figures = {each.get("name"): each.get("value", "") for each in case.iter("property")}
            if figures.keys() >= set(FIELDS) and case.find("failure") is None and case.find("error") is None:
                name = case.get("name", "").partition("[")[2].removesuffix("]")
                found[GROUPS[case.get("classname", "")]][name] = tuple(str(figures[field]) for field in FIELDS)
    return found


def table(found: dict[str, dict[str, Row]]) -> Iterator[str]:
    """A table in Markdown: of each group the number of architectures, the sums, and the largest deviation."""
    yield f"| {' | '.join(TITLES)} |"
    yield "|---|" + "---:|" * (len(TITLES) - 1)
    for group in (each for each in GROUPS.values() if each in found):
        figures = found[group].values()
        sums = (f"{sum(int(row[column]) for row in figures):,}" for column in range(len(FIELDS) - 1))
        worst = max(float(row[-1]) for row in figures)
        yield f"| {group} | {len(figures)} | {' | '.join(sums)} | {worst:.1e} |"


def main() -> None:
    """Print the table."""
    sys.stdout.write("\n".join([*table(rows(map(Path, sys.argv[1:]))), ""]))


if __name__ == "__main__":
    main()
