"""The sockets that the server listens on."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, suppress
from os.path import samestat
from pathlib import Path
from typing import Any

from layertap.models.errors import LayertapError, escape

BACKLOG = 2048  # connections that wait to be served, as uvicorn has it
ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # a name may have an address of a family that is off
REFUSALS = {  # why nobody listens there, and what to type instead
    errno.EADDRINUSE: ("is taken", "use --port with another number; --port 0 takes one that is free"),
    errno.EADDRNOTAVAIL: ("is no address of this machine", "use --host 127.0.0.1, or 0.0.0.0 for all addresses"),
    errno.EACCES: ("is not for everybody", "use --port with a number from 1024 on"),
}
# For the server's user and group; where there is no key either, whoever may open it may do everything.
UNIX_MODE = 0o660
CONNECT_S = 1  # to find out whether somebody serves a Unix socket
Address = tuple[Any, ...] | str  # the latter is a Unix socket's path


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for all addresses of a host, on one port; who connects waits until somebody serves it.

    Without a host on all interfaces. LayertapError where it can't be resolved, or an address is taken or not to be had.
    """
    try:
        infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        hint = "use --host with an address of this machine: 127.0.0.1"
        raise LayertapError(f"the host {escape(host)} can't be resolved", hint=hint) from None
    with ExitStack() as opened:
        listeners: list[socket.socket] = []
        for family, address in dict.fromkeys((family, address) for family, *_, address in infos):
            place = (address[0], port, *address[2:])
            try:
                listener = opened.enter_context(socket.create_server(place, family=family, backlog=BACKLOG))
            except OSError as error:
                refusal = error
                if error.errno not in ABSENT:
                    raise _explain_refusal(place, error) from None
            else:
                listeners.append(listener)
                port = listener.getsockname()[1]  # where it was 0
        if not listeners:
            raise _explain_refusal(place, refusal)
        opened.pop_all()
    return listeners


class UnixListener(socket.socket):
    """A Unix socket that knows which file it has made."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX)
        self._path = path

    def open(self) -> None:
        """Make the file, and listen; OSError."""
        self.bind(str(self._path))
        self._made = self._path.lstat()
        self._path.chmod(UNIX_MODE)  # nobody connects before the next line
        self.listen(BACKLOG)

    def remove_path(self) -> None:
        """Let nobody find it any more; what somebody has put in its place stays."""
        with suppress(OSError):  # what is not there nobody finds
            if samestat(self._path.lstat(), self._made):
                self._path.unlink()


def bind_unix(path: Path) -> UnixListener:
    """A listening Unix socket, which the server's user and group may open, in place of one that nobody serves any more.

    LayertapError where somebody serves it, something else is there, or it is not to be had.
    """
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        with ExitStack() as opened:
            listener = opened.enter_context(UnixListener(path))
            listener.open()
            opened.pop_all()
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"can't be listened on: {error.strerror or error}"
        raise LayertapError(
            f"the Unix socket {escape(str(path))} {reason}", hint="use --uds with another path"
        ) from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except (TimeoutError, BlockingIOError):  # so many wait to be served
            return True
    return True


def format_url(address: Address, scheme: str = "http") -> str:
    """What a client types to reach a socket of this address; of a Unix socket its path, as nginx and curl write it."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _explain_refusal(place: tuple[Any, ...], error: OSError) -> LayertapError:
    reason, hint = REFUSALS.get(error.errno or 0, (f"can't be listened on: {error.strerror}", ""))
    return LayertapError(f"{format_url(place)} {reason}", hint=hint)
