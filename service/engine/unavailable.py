"""Why a model can't be asked: the errors that say so."""

from __future__ import annotations

from layertap.service.errors import UnavailableError

FAILURE_RETRY_S = 60.0
RESTART_S = 5.0  # until another process takes the place of one that ends


def failure_error(reason: str) -> UnavailableError:
    """The answer where this process can't go on."""
    return UnavailableError(reason, hint="the server has to be restarted", retry_after=FAILURE_RETRY_S)


def ending_error() -> UnavailableError:
    """The answer of a process that ends."""
    return UnavailableError("the server is shutting down", retry_after=RESTART_S)


def unloading_error(name: str, seconds: float) -> UnavailableError:
    """The answer where a model is about to go, once it has done what it has: in so many seconds."""
    return UnavailableError(f"model {name} is being unloaded", retry_after=seconds)
