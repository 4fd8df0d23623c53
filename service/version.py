"""The version of layertap."""

from __future__ import annotations

from importlib import metadata


def get_version() -> str:
    """The installed version; "0" in a folder that was never installed."""
    try:
        return metadata.version("layertap")
    except metadata.PackageNotFoundError:
        return "0"
