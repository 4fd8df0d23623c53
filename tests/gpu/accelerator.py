"""The accelerator of this process: a GPU, or the simulated one where torch finds its plugin. Tests are the same."""

from __future__ import annotations

import pytest
import torch

from layertap.models.spec import PreprocessSpec

FOUND = torch.accelerator.current_accelerator(check_available=True)
KIND = FOUND.type if FOUND is not None else "cpu"
DEVICE = torch.device(KIND, 0)
IS_SIMULATED = KIND == "sim"
SIDE = 48 if IS_SIMULATED else 224  # of pictures: a simulated device has one slow thread
HOW = PreprocessSpec(resize=SIDE + 8, crop=SIDE)
on_accelerator = [pytest.mark.gpu, pytest.mark.skipif(FOUND is None, reason="needs an accelerator")]
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(KIND != "cuda", reason="needs a CUDA device")]
simulated_only = pytest.mark.skipif(not IS_SIMULATED, reason="needs the simulated accelerator")
