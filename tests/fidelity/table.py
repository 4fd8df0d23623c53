"""The figures of a run as a table: ``python -m tests.fidelity.table R.xml``, from pytest with ``--junitxml=R.xml``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

COLUMNS = ("layers", "tensors", "identical", "deviation")


def lines(report: Path) -> Iterator[str]:
    """One line of Markdown for each model that passed."""
    yield "| model | layers | tensors compared | equal to the bit | largest deviation |"
    yield "|---|--:|--:|--:|--:|"
    for case in ElementTree.parse(report).iter("testcase"):
        found = {each.get("name"): each.get("value") for each in case.iter("property")}
        if set(COLUMNS) <= found.keys() and case.find("failure") is None:
            name = str(case.get("name")).partition("[")[2].rstrip("]")
            yield f"| {name} | " + " | ".join(str(found[column]) for column in COLUMNS) + " |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(Path(sys.argv[1]))) + "\n")
