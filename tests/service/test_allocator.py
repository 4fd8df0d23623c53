"""What a serving process asks of its allocators."""

from __future__ import annotations

import os

import pytest

from layertap.service.allocator import HUGE_PAGES, keep_large_blocks, release_memory

SETTING = "THP_MEM_ALLOC_ENABLE"


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_huge_pages(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors get huge pages, unless the operator has said otherwise; memory can be released at any time."""
    monkeypatch.setenv(SETTING, given or "")
    if given is None:
        monkeypatch.delenv(SETTING)
    keep_large_blocks()
    assert os.environ[SETTING] == found
    release_memory()
