"""The figures of fidelity runs as tables for `docs/explanation/fidelity.md`.

``python -m tests.fidelity.table REPORT.xml …``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from xml.etree import ElementTree

FIELDS = ("layers", "tensors", "identical")
TITLES = ("test", "architectures", "modules that run", "tensors compared", "bit for bit equal", "largest deviation")


def main() -> None:
    """Print a row for each test: how many cases passed, their sums, and the largest relative deviation."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for report in sys.argv[1:]:
        for case in ElementTree.parse(report).iter("testcase"):
            figures = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
            if figures and case.find("failure") is None and case.find("error") is None:
                test, _, name = case.get("name", "").partition("[")
                found[f"{case.get('classname')}.{test}"][name] = figures
    lines = [TITLES, ["---"] * len(TITLES)]
    for test, cases in found.items():
        sums = [f"{sum(int(each[field]) for each in cases.values()):,}" for field in FIELDS]
        lines.append([test, str(len(cases)), *sums, max((each["deviation"] for each in cases.values()), key=float)])
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
