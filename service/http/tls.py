"""TLS by files: a certificate and its key."""

from __future__ import annotations

import ssl

NO_PASSWORD = ""  # where a key asks for one, loading fails: nobody is there to type it


def check_certificate(cert: str, key: str) -> None:
    """OSError, of which ssl.SSLError is one, where these files are no certificate with its key."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, NO_PASSWORD)
