"""What a processor is called."""

from __future__ import annotations

import platform

import torch

from layertap.models.devices.devices import describe_processor


def test_processor() -> None:
    """Code compiled for one processor is of its machine, of what torch uses of it, and of its features."""
    machine, used, features = describe_processor(torch.device("cpu"))
    assert machine == platform.machine()
    assert used == torch.backends.cpu.get_cpu_capability()
    assert features
    assert describe_processor(torch.device("cpu")) == [machine, used, features]
