"""What the fuzzer starts from is read; the same with something changed is read or refused. Needs no fuzzer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.readers import READERS

SEEDS = [(name, seed) for name, reader in READERS.items() for seed in reader.seeds()]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_seeds(name: str, seed: str) -> None:
    """Each is good."""
    READERS[name].read(READERS[name].seeds()[seed])


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=100)
def test_changed(name: str, data: st.DataObject) -> None:
    """Whatever is changed in one, the reader's own refusals are all that it raises."""
    reader = READERS[name]
    body = bytearray(data.draw(st.sampled_from(list(reader.seeds().values()))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)) | st.integers(0, 32))
        body[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        reader.read(bytes(body))
    except reader.refusals:
        return
