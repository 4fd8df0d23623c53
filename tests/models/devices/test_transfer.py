"""Rows on their way to a device, with the CPU in the place of a GPU; what a GPU does is in ``tests/gpu``."""

from __future__ import annotations

import pytest
import torch

from layertap.models.devices import transfer

CPU = torch.device("cpu")
ROWS = torch.arange(24.0).reshape(2, 3, 2, 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_is_the_forwards_own(count: int) -> None:
    """Rows of any memory format are one contiguous batch of the dtype; what is written to it reaches no sender."""
    sent = [ROWS.clone().to(memory_format=torch.channels_last) for _ in range(count)]
    batch = transfer.to_device(sent, torch.float64, CPU)
    assert batch.dtype is torch.float64
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.cat(sent).double())
    same = transfer.to_device(sent, torch.float32, CPU)
    same.zero_()
    assert all(torch.equal(each, ROWS) for each in sent)
