"""Every call of every module of one forward, watched, and a clock that does so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from layertap.models.devices import transfer
from layertap.models.hooks.attach import ATTACH

Run = Callable[[Mapping[str, Tensor]], object]
OnModuleCall = Callable[[nn.Module, int, object], None]  # gets the module, the number of its call, and a value


@contextmanager
def observe_calls(module: nn.Module, enter: OnModuleCall, leave: OnModuleCall) -> Iterator[None]:
    """Until the block ends, ``enter`` gets what each call of each module takes, and ``leave`` what it returns."""
    with ExitStack() as stack:
        for part in list_observed(module):
            ATTACH["input"](stack, part, partial(enter, part))
            ATTACH["output"](stack, part, partial(leave, part))
        yield


def list_observed(module: nn.Module) -> list[nn.Module]:
    """All modules of a tree but those within a scripted part: their hooks never run, they count as never called."""
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    inside = {id(part) for whole in scripted for part in whole.modules() if part is not whole}
    return [part for part in module.modules() if id(part) not in inside]


class CallTimer:
    """When each call of one forward began and ended, from 0 to 1; ``total`` are the forward's seconds."""

    def __init__(self, module: nn.Module, run: Run, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        self._starts: dict[tuple[nn.Module, int], float] = {}
        self._ends: dict[tuple[nn.Module, int], float] = {}

        def note(marks: dict[tuple[nn.Module, int], float], module: nn.Module, call: int, value: object) -> None:
            transfer.synchronize(device)
            marks[module, call] = time.perf_counter()

        with observe_calls(module, partial(note, self._starts), partial(note, self._ends)):
            transfer.synchronize(device)
            self._zero = time.perf_counter()
            run(inputs)
        self.total = max([*(end - self._zero for end in self._ends.values()), 1e-9])

    def get_cost_before(self, module: nn.Module, call: int) -> float:
        """The share of the whole forward spent when a call began, 0 to 1."""
        return self._share(self._starts.get((module, call)))

    def get_cost_after(self, module: nn.Module, call: int) -> float:
        """The share of the whole forward spent when a call ended, 0 to 1."""
        return self._share(self._ends.get((module, call)))

    def _share(self, mark: float | None) -> float:
        return 1.0 if mark is None else round(min((mark - self._zero) / self.total, 1.0), 4)
