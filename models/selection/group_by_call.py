"""What is wanted at hook points, by the hooks that see it; needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from layertap.models.hooks.sites import Side
from layertap.models.selection.hook_points import HookPoint

Item = TypeVar("Item")
Module = TypeVar("Module")


def group_by_call(
    items: Iterable[tuple[HookPoint, Item]], modules: Mapping[str, Module]
) -> dict[tuple[Module, Side], dict[int, list[Item]]]:
    """Items by module and side, then by call, in the order given; ``modules`` are by name, the whole one as ``.``.

    A tied module has several names and one set of hooks.
    """
    groups: dict[tuple[Module, Side], dict[int, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for point, item in items:
        groups[modules[point.layer], point.side][point.call].append(item)
    return groups
