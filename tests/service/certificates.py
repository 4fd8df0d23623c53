"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A certificate that stands for itself, and its key, as files."""

    cert: Path
    key: Path

    def trust(self) -> ssl.SSLContext:
        """What a client believes that trusts this one alone."""
        return ssl.create_default_context(cafile=str(self.cert))


def make_certificate(folder: Path, name: str = "server", host: str = "localhost") -> Certificate:
    """A new one for 127.0.0.1 and a host's name."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host},IP:127.0.0.1"),
            *("-keyout", str(made.key), "-out", str(made.cert)),
        ],
        check=True,
        capture_output=True,
    )
    return made
