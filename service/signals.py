"""What signals do while a server is being put together; imports nothing that takes long."""

from __future__ import annotations

import os
import signal


def exit_cleanly_on_signals() -> None:
    """Have SIGTERM and SIGINT end this process with status 0 from now on: it was asked to end, and did.

    At once, by no exception: what is being imported just then may swallow it, and the server would go on.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def hold_hangups() -> None:
    """Have SIGHUP wait until ``release_hangups``: until somebody takes it, it would end this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def release_hangups() -> None:
    """Let SIGHUP come, also one that waits."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
