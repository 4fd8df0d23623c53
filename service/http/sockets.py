"""The sockets that the server listens on."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

from layertap.models.errors import LayertapError, escape

ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # a name may have an address of a family that is off
REFUSALS = {  # the reason, and what to type instead
    errno.EADDRINUSE: ("is taken", "use --port with another number; --port 0 takes one that is free"),
    errno.EADDRNOTAVAIL: ("is no address of this machine", "use --host 127.0.0.1, or 0.0.0.0 for all addresses"),
    errno.EACCES: ("is not for this user", "use --port with a number from 1024 on"),
}
UNIX_MODE = 0o660  # for the server's user and group, which need no key
CONNECT_S = 1  # to find out whether a Unix socket is served
Address = tuple[Any, ...] | str  # the latter is a Unix socket's path


def listen(host: str, port: int, uds: Path | None = None) -> list[socket.socket]:
    """Listening sockets: the Unix socket, or one for each address of the host (empty: all interfaces), on one port.

    LayertapError if the host can't be resolved, or an address is taken or not available.
    """
    if uds is not None:
        return [_listen_at_path(uds)]
    try:
        infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _explain((host, port), error) from None
    listeners: list[socket.socket] = []
    for family, *_, (name, _, *rest) in dict.fromkeys(infos):
        try:
            listeners.append(socket.create_server((name, port, *rest), family=family))
            port = listeners[0].getsockname()[1]  # if it was 0
        except OSError as error:
            refusal = _explain((name, port), error)
            if error.errno not in ABSENT:
                raise refusal from None
    if not listeners:
        raise refusal
    return listeners


def format_url(address: Address, scheme: str = "http") -> str:
    """The URL of a socket's address; of a Unix socket its path as nginx and curl write it."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen_at_path(path: Path) -> socket.socket:
    """A listening Unix socket, which replaces the file of a server that has ended; LayertapError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_S)
            if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
        listener.bind(str(path))
        path.chmod(UNIX_MODE)  # nobody connects before the next line
        listener.listen()
    except OSError as error:
        listener.close()
        raise _explain(str(path), error) from None
    return listener


def _explain(address: Address, error: OSError | UnicodeError) -> LayertapError:
    text = getattr(error, "strerror", None) or error
    reason, hint = REFUSALS.get(getattr(error, "errno", 0), (f"can't be listened on: {text}", ""))
    if isinstance(address, str):
        return LayertapError(f"the Unix socket {escape(address)} {reason}", hint="use --uds with another path")
    return LayertapError(f"{format_url(address)} {reason}", hint=hint)
