"""A layertap server that a command asks, by ``layertap_client``; what that raises, as errors of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import layertap_client as lt
from layertap.models.errors import LayertapError
from layertap_client.transport import KEY_VARIABLE


@contextmanager
def convert_errors(url: str, hint: str = "") -> Iterator[None]:
    """Raise the client's errors as LayertapError; ``hint`` is for a server that does not answer."""
    try:
        yield
    except lt.LayertapError as error:
        raise convert_error(error, url, hint) from error


def convert_error(error: lt.LayertapError, url: str, hint: str = "") -> LayertapError:
    """What a client has raised, for whoever typed the command."""
    if isinstance(error, lt.ProblemError):
        wants_key = isinstance(error, lt.AuthenticationError)
        return LayertapError(f"{url}: {error.detail}", hint=f"set {KEY_VARIABLE}" if wants_key else error.hint)
    if isinstance(error, lt.BadReplyError):
        address = "the address is the server's own, without /v1 or /v2 behind it"
        return LayertapError(f"{url} does not answer as a layertap server does: {error}", hint=address)
    return LayertapError(str(error), hint=hint if isinstance(error, lt.ConnectionFailedError) else "")
