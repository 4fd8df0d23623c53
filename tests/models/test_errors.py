"""Errors: how one is located in a request, and what is left of it once it has been told."""

from __future__ import annotations

import pytest

from layertap.models.errors import clear_tracebacks


def failing(kept: Exception, cause: Exception) -> None:
    """Raise a ValueError with a cause whose context is ``kept``."""
    try:
        try:
            raise kept
        except KeyError:
            raise cause  # noqa: B904
    except OSError:
        raise ValueError("last") from cause


def test_let_go() -> None:
    """No error of a chain keeps frames, be it a cause, a context, or part of a circle."""
    kept, cause = KeyError("kept by a model"), OSError("another")
    with pytest.raises(ValueError, match="last") as caught:
        failing(kept, cause)
    kept.__cause__ = caught.value
    chain = (caught.value, cause, kept)
    assert all(error.__traceback__ for error in chain)
    clear_tracebacks(caught.value)
    assert [error.__traceback__ for error in chain] == [None] * 3
