"""Errors of the service, in addition to ``layertap.models.errors``; ``http/problems.py`` has their statuses."""

from __future__ import annotations

from layertap.models.errors import LayertapError

FAILURE_RETRY_S = 60.0
START_RETRY_S = 5.0  # a refusal is cheap, and nobody knows how long a model takes to load
RESTART_S = 5.0  # until another process takes the place of one that ends


class ForwardError(RuntimeError):
    """A model's forward raised an unexpected exception, logged as the cause. A bug, so not a LayertapError."""


class BadRequestError(LayertapError):
    """The body is not what its content type says."""


class KeyMissingError(LayertapError):
    """No API key, or one that is not known."""


class ForbiddenError(LayertapError):
    """A known key that may not do this."""


class ConflictError(LayertapError):
    """The operation conflicts with one in progress, or this kind of server does not support it."""


class NotAcceptableError(LayertapError):
    """None of the formats on offer suits the request."""


class BodyTimeoutError(LayertapError):
    """The body did not arrive in time."""


class UnsupportedMediaError(LayertapError):
    """A body's content type, or a kind of picture, is not accepted."""


class NotInstalledError(LayertapError):
    """A required package is not installed."""


class RetryLaterError(LayertapError):
    """The request can't be served now; ``retry_after`` is in seconds, None if waiting does not help."""

    def __init__(self, detail: str, *, retry_after: float | None, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.retry_after = retry_after


class QueueFullError(RetryLaterError):
    """The queue holds as many rows as it may."""


class QueueTooLongError(QueueFullError):
    """The deadline would pass in the queue; the answer is expected to take ``needed_s`` seconds."""

    def __init__(self, detail: str, *, retry_after: float, needed_s: float, hint: str = "") -> None:
        super().__init__(detail, retry_after=retry_after, hint=hint)
        self.needed_s = needed_s


class UnavailableError(RetryLaterError):
    """The model is not ready, or the server is draining."""


class TooManyConnectionsError(UnavailableError):
    """More connections are open than may be."""


def failure_error(reason: str) -> UnavailableError:
    """The error if this process has failed for good."""
    return UnavailableError(reason, hint="the server has to be restarted", retry_after=FAILURE_RETRY_S)


def ending_error() -> UnavailableError:
    """The error while this process shuts down."""
    return UnavailableError("the server is shutting down", retry_after=RESTART_S)


def starting_error(name: str, seconds: float) -> UnavailableError:
    """The error while the server starts, and has been loading a model for some seconds."""
    detail = f"the server has just started, and model {name} is loading"
    return UnavailableError(detail, retry_after=min(seconds, START_RETRY_S))


def unloading_error(name: str, seconds: float) -> UnavailableError:
    """The error while a model finishes its queue, in so many seconds, to be unloaded."""
    return UnavailableError(f"model {name} is being unloaded", retry_after=seconds)


def unloaded_error(name: str) -> UnavailableError:
    """The error for a model that an administrator has unloaded."""
    hint = f"POST /models/{name}/load with an administrator's key; only models with 'load: lazy' load by a request"
    return UnavailableError(f"model {name} was unloaded", hint=hint, retry_after=None)


class DeadlineError(RetryLaterError):
    """The deadline passed before the answer; it is unknown how long the request would have taken."""

    needed_s = 0.0


class ClientGoneError(LayertapError):
    """The client closed the connection before its answer."""
