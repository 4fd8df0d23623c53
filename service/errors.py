"""What can go wrong in the service, on top of ``layertap.models.errors``.

LayertapError
├── BadRequestError            not JSON, broken multipart                        400
├── KeyMissingError            no key, or an unknown one                         401
├── ForbiddenError             a good key that may not do this                   403
├── ConflictError              not as long as something else goes on            409
├── NotAcceptableError         no format on offer suits                          406
├── BodyTimeoutError           the body came too slowly                          408
├── UnsupportedMediaError      the body's type is not taken                      415
├── NotInstalledError          a package that it needs is not installed here     501
├── RetryLaterError            carries seconds for Retry-After
│   ├── QueueFullError         no room for the request                           429
│   │   └── QueueTooLongError  the deadline would pass                            429
│   ├── UnavailableError       model loading or failed, server draining          503
│   └── DeadlineError          time ran out                                      504
└── ClientGoneError            nobody is there to be answered                    499
"""

from __future__ import annotations

from layertap.models.errors import LayertapError

FAILURE_RETRY_S = 60.0
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
    """It can't be done beside something else that goes on, or in a server of this kind."""


class NotAcceptableError(LayertapError):
    """None of the formats on offer suits the request."""


class BodyTimeoutError(LayertapError):
    """The body did not arrive in time."""


class UnsupportedMediaError(LayertapError):
    """A body of this content type is not taken."""


class NotInstalledError(LayertapError):
    """It needs a package that is not installed here."""


class RetryLaterError(LayertapError):
    """Not now; ``retry_after`` is in seconds."""

    def __init__(self, detail: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.retry_after = retry_after


class QueueFullError(RetryLaterError):
    """The queue holds as many rows as it may."""


class QueueTooLongError(QueueFullError):
    """So much is to be done that the deadline would pass; the answer is expected to take ``needed_s`` seconds."""

    def __init__(self, detail: str, *, retry_after: float, needed_s: float, hint: str = "") -> None:
        super().__init__(detail, retry_after=retry_after, hint=hint)
        self.needed_s = needed_s


class UnavailableError(RetryLaterError):
    """The model is not ready, or the server is draining."""


def failure_error(reason: str) -> UnavailableError:
    """The answer where this process can't go on."""
    return UnavailableError(reason, hint="the server has to be restarted", retry_after=FAILURE_RETRY_S)


def ending_error() -> UnavailableError:
    """The answer of a process that ends."""
    return UnavailableError("the server is shutting down", retry_after=RESTART_S)


def unloading_error(name: str, seconds: float) -> UnavailableError:
    """The answer where a model is about to go, once it has done what it has: in so many seconds."""
    return UnavailableError(f"model {name} is being unloaded", retry_after=seconds)


def unloaded_error(name: str) -> UnavailableError:
    """The answer for a model of the start that an administrator has unloaded."""
    hint = f"POST /models/{name}/load with an administrator's key; only models with 'load: lazy' load by a request"
    return UnavailableError(f"model {name} was unloaded", hint=hint, retry_after=60.0)


class DeadlineError(RetryLaterError):
    """The request's time ran out before its answer; how much it would have needed nobody knows."""

    needed_s = 0.0


class ClientGoneError(LayertapError):
    """The client closed the connection before its answer."""
