"""TLS by files: a certificate that is renewed on the disk is used from the next connection on."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from functools import partial
from pathlib import Path

log = logging.getLogger("layertap")
LOOK_INTERVAL_S = 2.0
NO_PASSWORD = ""  # where a key asks for one, loading fails: nobody is there to type it


def check_certificate(cert: str, key: str) -> None:
    """OSError, of which ssl.SSLError is one, where these files are no certificate with its key."""
    _load_certificate(cert, key)


async def follow_renewals(context: ssl.SSLContext, cert: str, key: str, interval: float = LOOK_INTERVAL_S) -> None:
    """Have a server's context show a certificate and its key as their files are now, whenever these change, for ever.

    What can't be loaded, as a certificate whose key is yet to come, is told once and changes nothing.
    """
    known = _describe_files(cert, key)
    while True:
        await asyncio.sleep(interval)
        now = await asyncio.to_thread(_describe_files, cert, key)
        if now == known:
            continue
        known = now
        try:
            # Into a context of its own: one that is in use has the new certificate with the old key for a while.
            renewed = await asyncio.to_thread(_load_renewed, cert, key)
        except OSError as error:
            log.warning("the certificate is not renewed", extra={"fields": {"reason": error.strerror or str(error)}})
        else:
            context.sni_callback = partial(_show_certificate, renewed)
            log.info("the certificate is renewed")


def _load_renewed(cert: str, key: str) -> ssl.SSLContext:
    for path in (cert, key):
        if not Path(path).is_file():  # a pipe would hold the thread for ever
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
    return _load_certificate(cert, key)


def _load_certificate(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, NO_PASSWORD)
    return context


def _show_certificate(
    renewed: ssl.SSLContext, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
) -> None:
    """Called at each handshake, whether a host is named or not: all but the certificate stays the context's own."""
    connection.context = renewed


def _describe_files(*paths: str) -> list[tuple[int, ...] | None]:
    """What changes with files; links are followed, as where Kubernetes keeps secrets."""
    return [_describe_file(Path(path)) for path in paths]


def _describe_file(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
