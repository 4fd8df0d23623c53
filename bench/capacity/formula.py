"""The formula: each part of a machine bears so many images a second; the least of them is what the machine bears."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bench.capacity.costs import Fleet, ImageCosts, Machine

TARGET = 0.7  # of what a part bears: above, waiting grows quickly


def get_limits(costs: ImageCosts, machine: Machine, rows: float | None = None) -> dict[str, float]:
    """Images a second that each part of a machine bears, in forwards of ``rows`` (of as many as they may have)."""
    forward_s = costs.get_forward_s(rows or costs.max_rows)
    if not machine.devices:
        parts = {"cores": (machine.cores, costs.decode_s + costs.front_s + forward_s)}
    else:
        parts = {
            "decode": (machine.decode_cores, costs.decode_s),
            "forward": (machine.devices, forward_s),
            "copy to the device": (machine.devices * machine.device_bytes_s, costs.device_bytes),
        }
    parts |= {
        "front": (machine.servers, costs.front_s),
        "network in": (machine.network_bytes_s, costs.image_bytes),
        "network out": (machine.network_bytes_s, costs.reply_bytes),
    }
    return {name: has / costs_ for name, (has, costs_) in parts.items() if costs_ > 0}


def find_bottleneck(limits: Mapping[str, float]) -> tuple[str, float]:
    """The part that bears least, and how many images a second that is."""
    return min(limits.items(), key=lambda limit: limit[1])


def get_fleet_limits(costs: ImageCosts, fleet: Fleet) -> dict[str, float]:
    """The same of all machines together, and of the index that they share."""
    limits = {name: fleet.machines * limit for name, limit in get_limits(costs, fleet.machine).items()}
    if fleet.index_bytes_s is not None and costs.index_bytes > 0:
        limits["index"] = fleet.index_bytes_s / costs.index_bytes
    return limits


def count_machines(costs: ImageCosts, machine: Machine, per_second: float, target: float = TARGET) -> int:
    """How many machines bear so many images a second while none of their parts is busier than ``target``."""
    _, limit = find_bottleneck(get_limits(costs, machine))
    return math.ceil(per_second / (target * limit))


def get_index_bytes_s(costs: ImageCosts, per_second: float) -> float:
    """Bytes a second that the index must take."""
    return per_second * costs.index_bytes
