"""The sockets that the server listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from layertap.models.errors import LayertapError, escape

BIND_TRIES = 8  # a port that is free for one address of a host may be taken for the next
BACKLOG = 2048  # connections that wait to be served, as uvicorn has it
ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})  # a name may have an address of a family that is off
REFUSALS = {  # why nobody listens there, and what to type instead
    errno.EADDRINUSE: ("is taken", "use --port with another number; --port 0 takes one that is free"),
    errno.EADDRNOTAVAIL: ("is no address of this machine", "use --host 127.0.0.1, or 0.0.0.0 for all addresses"),
    errno.EACCES: ("is not for everybody", "use --port with a number from 1024 on"),
}
UNIX_MODE = (
    0o660  # for the server's user and group; where there is no key either, whoever may open it may do everything
)
Address = tuple[Any, ...] | str  # the latter is a Unix socket's path


class UnixListener(socket.socket):
    """A listening Unix socket; ``file`` is what the path was when it was bound: device and inode."""

    file: tuple[int, int] | None = None


class _PortTakenError(LayertapError):
    """Somebody else has the port."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for all addresses of a host, on one port; who connects waits until somebody serves it.

    LayertapError where the host can't be resolved, or an address is taken or not to be had.
    """
    addresses = _resolve(host)
    for _ in range(BIND_TRIES if port == 0 else 1):
        try:
            return _bind_all(host, addresses, port)
        except _PortTakenError as error:
            refusal = error
    raise refusal


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket, which the server's user and group may open; one that nobody serves any more makes room.

    LayertapError where somebody serves it, something else is there, or it is not to be had.
    """
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        listener = UnixListener(socket.AF_UNIX)
        with ExitStack() as opened:
            opened.enter_context(listener)
            listener.bind(str(path))
            path.chmod(UNIX_MODE)  # nobody connects before the next line
            listener.file = _identify(path)
            listener.listen(BACKLOG)
            opened.pop_all()
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"can't be listened on: {error.strerror or error}"
        raise LayertapError(
            f"the Unix socket {escape(str(path))} {reason}", hint="use --uds with another path"
        ) from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # so many wait to be served
            return True
    return True


def _bind_all(
    host: str, addresses: Iterable[tuple[socket.AddressFamily, tuple[Any, ...]]], port: int
) -> list[socket.socket]:
    refusal = LayertapError(f"the host {escape(host)} has no address")
    with ExitStack() as opened:
        listeners: list[socket.socket] = []
        for family, address in addresses:
            place = (address[0], port, *address[2:])
            try:
                listener = opened.enter_context(socket.create_server(place, family=family, backlog=BACKLOG))
            except OSError as error:
                refusal = _explain_refusal(place, error)
                if error.errno not in ABSENT:
                    raise refusal from None
            else:
                listeners.append(listener)
                port = listener.getsockname()[1]  # where it was 0
        if not listeners:
            raise refusal
        opened.pop_all()
    return listeners


def remove_path(listener: socket.socket) -> None:
    """Let nobody find a Unix socket any more; what another process has put in its place stays, and so do ports."""
    if isinstance(listener, UnixListener):
        path = Path(listener.getsockname())
        with suppress(OSError):  # what is no longer there nobody finds
            if listener.file == _identify(path):
                path.unlink()


def _identify(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def format_url(address: Address, scheme: str = "http") -> str:
    """What a client types to reach a socket of this address; of a Unix socket its path, as nginx and curl write it."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _resolve(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses of a host, each once; without a name those of all interfaces."""
    try:
        infos = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this is no name"
        hint = "use --host with an address of this machine: 127.0.0.1"
        raise LayertapError(f"the host {escape(host)} can't be resolved: {reason}", hint=hint) from None
    return list(dict.fromkeys((family, address) for family, *_, address in infos))


def _explain_refusal(place: tuple[Any, ...], error: OSError) -> LayertapError:
    reason, hint = REFUSALS.get(error.errno or 0, (f"can't be listened on: {error.strerror}", ""))
    kind = _PortTakenError if error.errno == errno.EADDRINUSE else LayertapError
    return kind(f"{format_url(place)} {reason}", hint=hint)
