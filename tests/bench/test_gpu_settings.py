"""What a run of the tests of accelerators says of the settings that need CUDA."""

from __future__ import annotations

from pathlib import Path

from bench.gpu_settings import TESTS, judge
from layertap.models.devices.devices import CUDA_ONLY

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.gpu.test_served" name="test_chosen_precision[{'tf32': True}]"/>
<testcase classname="tests.gpu.test_device_decoding" name="test_bad_ones"/>
<testcase classname="tests.gpu.test_device_decoding" name="test_many_at_once"><failure>no</failure></testcase>
<testcase classname="tests.gpu.test_cuda_graphs" name="test_captured"><skipped/></testcase>
<testcase classname="tests.gpu.test_cuda_graphs" name="test_served"><error>no</error></testcase>
</testsuite></testsuites>"""


def test_verdicts(tmp_path: Path) -> None:
    """A setting holds if its tests passed, fails if one did not, and is not shown where all were skipped."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    wanted = {"tf32": "holds", "decode: device": "fails", "cuda_graphs": "not shown", "compile": "fails"}
    assert judge(report) == wanted


def test_every_setting_has_its_tests() -> None:
    """The tests of each setting are there."""
    assert TESTS.keys() == CUDA_ONLY.keys()
    for name in TESTS.values():
        module, _, function = name.partition(".")
        text = Path(__file__).parents[1].joinpath("gpu", f"{module}.py").read_text()
        assert f"def {function.partition('[')[0] or 'test_'}" in text
