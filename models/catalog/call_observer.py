"""One forward with every call of every module watched, and a clock that does so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from layertap.models.hooks.attach import ATTACH

Run = Callable[[Mapping[str, Tensor]], object]


class CallObserver:
    """Calls ``enter`` and ``leave`` around every call of every module while ``watch`` runs one forward."""

    def __init__(self, module: nn.Module) -> None:
        # Hooks in a scripted part never run: what is in it is catalogued as never called.
        scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
        inside = {id(part) for whole in scripted for part in whole.modules() if part is not whole}
        self.modules = [part for part in module.modules() if id(part) not in inside]

    def watch(self, run: Run, inputs: Mapping[str, Tensor]) -> None:
        """Run one forward."""
        with ExitStack() as stack:
            for module in self.modules:
                ATTACH["input"](stack, module, partial(self.enter, module))
                ATTACH["output"](stack, module, partial(self.leave, module))
            self.attach(stack)
            self.begin()
            run(inputs)

    def attach(self, stack: ExitStack) -> None:
        """Put more hooks on the modules, which come after those around calls."""

    def begin(self) -> None:
        """The forward is about to begin."""

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """A call begins."""

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """A call ends."""


class CallTimer(CallObserver):
    """Seconds since the start at which each call began and ended."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.total = 0.0
        self._device = device
        self._zero = 0.0
        self._starts: dict[tuple[nn.Module, int], float] = {}
        self._ends: dict[tuple[nn.Module, int], float] = {}

    def watch(self, run: Run, inputs: Mapping[str, Tensor]) -> None:
        """Run one forward and note how long it took."""
        super().watch(run, inputs)
        self.total = max([*self._ends.values(), 1e-9])

    def begin(self) -> None:
        """Time zero."""
        self._zero += self._now()

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """Note the time."""
        self._starts[module, call] = self._now()

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Note the time."""
        self._ends[module, call] = self._now()

    def get_cost_before(self, module: nn.Module, call: int) -> float:
        """The share of the whole forward spent when a call began, 0 to 1."""
        return self._share(self._starts.get((module, call)))

    def get_cost_after(self, module: nn.Module, call: int) -> float:
        """The share of the whole forward spent when a call ended, 0 to 1."""
        return self._share(self._ends.get((module, call)))

    def _share(self, mark: float | None) -> float:
        return 1.0 if mark is None else round(min(mark / self.total, 1.0), 4)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._zero
