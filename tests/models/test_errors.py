"""What is left of an error once it has been told."""

from __future__ import annotations

import pytest

from models.errors import let_go


def test_let_go() -> None:
    """No error of a chain keeps frames, be it a cause, a context, or part of a circle."""
    kept, cause = KeyError("kept by a model"), OSError("another")
    with pytest.raises(ValueError, match="last") as caught:
        try:
            try:
                raise kept
            except KeyError:
                raise cause  # noqa: B904
        except OSError:
            raise ValueError("last") from cause
    last = caught.value
    kept.__cause__ = last
    chain = (last, cause, kept)
    assert all(error.__traceback__ for error in chain)
    let_go(last)
    assert [error.__traceback__ for error in chain] == [None] * 3
