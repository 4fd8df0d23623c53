"""Run layertap's own code inside a model's forward or backward: in the dtypes that it promises, its errors its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from layertap.models.devices.memory import is_device_error
from layertap.models.errors import HookError, LayertapError

T = TypeVar("T")


def run_own(function: Callable[..., T], *args: Any) -> T:
    """Call a function outside of the model's autocast; HookError if it raises what nobody expects of it."""
    try:
        if not torch._C._is_any_autocast_enabled():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)
    except Exception as error:
        if isinstance(error, LayertapError) or is_device_error(error):
            raise
        raise HookError(f"a hook raised {type(error).__name__}") from error
