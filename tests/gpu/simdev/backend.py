"""The simulated accelerator as torch's device ``sim``; torch imports this plugin where it finds it on the path."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from simdev import _C

break_device, mend_device, limit_memory = _C.break_device, _C.mend_device, _C.limit_memory
hide_memory, set_order = _C.hide_memory, _C.set_order


def autoload() -> None:
    """What torch calls once it has imported this: nothing is left to do."""


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return _C.current_device() if index is None else index


def _seed_all(seed: int) -> None:
    for index in range(_C.device_count()):
        _C.default_generator(index).manual_seed(seed)


torch.utils.rename_privateuse1_backend("sim")
module = types.ModuleType("torch.sim")
vars(module).update(
    device=lambda device: torch.accelerator.device_index(_index(device)),
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=_C.device_count,
    current_device=_C.current_device,
    set_device=lambda device: _C.set_device(_index(device)),
    manual_seed=lambda seed: _C.default_generator(_C.current_device()).manual_seed(seed),
    manual_seed_all=_seed_all,
    get_rng_state=lambda device="sim": _C.default_generator(_index(device)).get_state(),
    set_rng_state=lambda state, device="sim": _C.default_generator(_index(device)).set_state(state),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    synchronize=torch.accelerator.synchronize,
)
torch._register_device_module("sim", module)
sys.modules["torch.sim"] = module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
