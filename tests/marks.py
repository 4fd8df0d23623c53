"""Marks of parameters: one of each kind runs in ``make test``, the rest in ``make test-all`` or ``test-hard``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A set of parameters that only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def hard(*values: object) -> Any:
    """A set of parameters that only ``make test-hard`` runs."""
    return pytest.param(*values, marks=pytest.mark.hard)


def slow_but(quick: Collection[object], values: Iterable[object]) -> list[Any]:
    """Parameters of one name, of which ``make test`` runs only some."""
    return [value if value in quick else slow(value) for value in values]
