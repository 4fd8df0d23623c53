"""Why a model can't be asked: the errors that say so."""

from __future__ import annotations

from layertap.service.errors import UnavailableError

FAILURE_RETRY_S = 60.0


def failure_error(reason: str) -> UnavailableError:
    """The answer where this process can't go on."""
    return UnavailableError(reason, hint="the server has to be restarted", retry_after=FAILURE_RETRY_S)


def unloading_error(name: str) -> UnavailableError:
    """The answer where a model is about to go."""
    return UnavailableError(f"model {name} is being unloaded", retry_after=1.0)
