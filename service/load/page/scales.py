"""From values to places on paper, and the values that an axis names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = (1, 2, 5, 10)
LOG_STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Scale:
    """``least`` to ``most`` is shown from ``begin`` to ``end``, in equal steps or, where ``log``, in equal ratios."""

    least: float
    most: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is, to a tenth; what is beyond the scale is at its end."""
        value = min(max(value, self.least), self.most)
        if self.log:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return round(self.begin + share * (self.end - self.begin), 1)


def choose_ticks(most: float, count: int = 5) -> list[float]:
    """Round values from 0 to at least ``most``, about so many, in steps of 1, 2 or 5 times a power of ten."""
    rough = max(most, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in STEPS if each * power >= rough * (1 - 1e-9))
    return [round(number * step, 12) for number in range(math.ceil(most / step - 1e-9) + 1 or 2)]


def choose_log_ticks(least: float, most: float) -> list[float]:
    """Values of 1, 2, 5 times a power of ten within a range."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [step * 10.0**power for power in powers for step in LOG_STEPS]
    return [value for value in values if least <= value <= most]


def format_value(value: float) -> str:
    """Short, with as many decimals as three digits need: 0.25, 3.5, 120, 1,500."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def thin_out(ticks: Sequence[float], scale: Scale, gap: float) -> list[float]:
    """Those that are at least ``gap`` from the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or abs(scale.place(tick) - scale.place(kept[-1])) >= gap:
            kept.append(tick)
    return kept
