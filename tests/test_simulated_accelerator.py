"""The tests of accelerators on a simulated one, in a process of their own: there ``auto`` is that device for all.

Each of these changes was tried, and fails the test beside it, by the name of its file:

=====================================================  ===============================================================
without the wait of ``transfer.synchronize_stream``    test_transfer: test_another_thread_uses_what_was_waited_for
without that of ``to_host``                            test_transfer: test_results_from_the_device
without that of ``DeviceDecoder``                      test_transfer: test_decoded_rows
without that of ``join_rows``                          test_transfer: test_joined_rows
without ``record_stream``                              test_transfer: test_rows_of_another_stream
without the wait at the end of loading                 test_failures: test_what_loading_puts_back
one pinned buffer for all batches                      test_transfer: test_batches_to_the_device
a wait for the first of several devices                test_failures: test_what_loading_puts_back
no question whether a device is lost after a load      test_failures: test_lost_at_the_start
an error of a load that keeps its frames               test_failures: test_a_failed_load_leaves_nothing
torch's cache kept after a failed load                 test_failures: test_a_failed_load_leaves_nothing
generators of devices not put back                     test_accelerators: test_generators_are_put_back
a sketch's weights kept on each device                 test_failures: test_a_survey_leaves_nothing
=====================================================  ===============================================================
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.simdev.build import find_folder
from tests.service.load_server import ROOT

SHOWN = 6000  # characters of what the tests say
TESTS_S = 840


@pytest.mark.timeout(900)
def test_on_a_simulated_accelerator() -> None:
    """All that is true of a GPU, but what only CUDA does, is true of a device whose streams compute when they like."""
    folder = find_folder()
    if not folder.exists():
        pytest.skip("`python -m tests.gpu.simdev.build` builds the simulated accelerator, as `make test-all` does")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-SHOWN:]
    assert " passed" in done.stdout
