"""Whether one more connection may be open: by the setting, and by the files that the process may have."""

from __future__ import annotations

from asyncio import BaseTransport
from dataclasses import dataclass

from layertap.service.metrics import ConnectionReason
from layertap.service.settings import count_allowed_files

MAX_REFUSED = 64  # connections that are told that they are too many: until their clients have read it they are open
SPARE_FILES, LAST_FILES = 32, 8  # kept for the server itself; for those that are just refused, too


@dataclass(frozen=True)
class ConnectionRefusal:
    """Why a connection is not taken; ``says_why`` to its client, which keeps it open for a moment."""

    reason: ConnectionReason
    says_why: bool


def find_connection_refusal(transport: BaseTransport, count: int, limit: int) -> ConnectionRefusal | None:
    """Why a connection, with which ``count`` are open, is not taken; None where it is.

    Of files a system gives the lowest number that is free, so that of a new connection tells how many are open. Without
    this the event loop would close who comes then without a word to anybody (libuv does).
    """
    if count > limit:
        return ConnectionRefusal("limit", says_why=count <= limit + MAX_REFUSED)
    files = count_allowed_files()
    connection = transport.get_extra_info("socket")
    free = files - connection.fileno() if files is not None and connection is not None else SPARE_FILES
    return ConnectionRefusal("descriptors", says_why=free >= LAST_FILES) if free < SPARE_FILES else None
