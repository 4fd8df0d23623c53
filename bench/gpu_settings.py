"""Which settings that need CUDA hold on this device: ``python -m bench.gpu_settings REPORT`` of ``pytest tests/gpu``.

The report is pytest's ``--junit-xml``. A setting holds if all its tests passed; skipped tests show nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from layertap.models.devices.devices import CUDA_ONLY

# The tests of each setting: the beginning of their names, module first.
TESTS = {
    "tf32": "test_served.test_chosen_precision[{'tf32'",
    "decode: device": "test_device_decoding.",
    "cuda_graphs": "test_cuda_graphs.test_captured",
    "compile": "test_cuda_graphs.test_served",
}
FAILED = frozenset({"failure", "error"})


def judge(report: Path) -> dict[str, str]:
    """For each setting ``holds``, ``fails`` or ``not shown``."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    found = [
        (f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}", {each.tag for each in case})
        for case in cases
    ]
    return {setting: _judge([tags for name, tags in found if name.startswith(TESTS[setting])]) for setting in CUDA_ONLY}


def _judge(cases: list[set[str]]) -> str:
    if any(tags & FAILED for tags in cases):
        return "fails"
    return "holds" if any("skipped" not in tags for tags in cases) else "not shown"


def main() -> None:
    """Print a line for each setting, with what it needs."""
    for setting, verdict in judge(Path(sys.argv[1])).items():
        print(f"{setting}: {verdict} (it needs {CUDA_ONLY[setting]})")


if __name__ == "__main__":
    main()
