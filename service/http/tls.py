"""TLS by files: a certificate that is renewed on the disk is used from the next connection on."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger("layertap")
LOOK_INTERVAL_S = 2.0
NO_PASSWORD = ""  # where a key asks for one, loading fails: nobody is there to type it


def check_certificate(cert: str, key: str) -> None:
    """OSError, of which ssl.SSLError is one, where these files are no certificate with its key."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, NO_PASSWORD)


async def follow_renewals(context: ssl.SSLContext, cert: str, key: str, interval: float = LOOK_INTERVAL_S) -> None:
    """Load certificate and key into a server's context whenever their files change, for ever.

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
            await asyncio.to_thread(check_certificate, cert, key)
            context.load_cert_chain(cert, key, NO_PASSWORD)  # on the loop: no handshake reads the context meanwhile
        except OSError as error:
            log.warning("the certificate is not renewed", extra={"fields": {"reason": error.strerror or str(error)}})
        else:
            log.info("the certificate is renewed")


def _describe_files(*paths: str) -> list[tuple[int, ...] | None]:
    """What changes with files; links are followed, as where Kubernetes keeps secrets."""
    return [_describe_file(Path(path)) for path in paths]


def _describe_file(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
