"""What a serving process asks of the allocators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from layertap.service.allocator import HUGE_PAGES

SETTING = "THP_MEM_ALLOC_ENABLE"
LARGE = """
import os
from layertap.service.allocator import keep_large_blocks

keep_large_blocks()
import torch

with open("/proc/self/smaps") as maps:
    before = sum(line.startswith("VmFlags") and " hg" in line for line in maps)
tensor = torch.ones(64, 2**20)
with open("/proc/self/smaps") as maps:
    print(sum(line.startswith("VmFlags") and " hg" in line for line in maps) > before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="needs a kernel that has huge pages")
def test_huge_pages() -> None:
    """Large tensors get them."""
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    done = subprocess.run([sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
