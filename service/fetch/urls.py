"""URLs that may be fetched: a strict grammar, and the hosts that the operator allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address

from layertap.models.errors import InputError, escape
from layertap.service.settings import SettingsError

PORTS = {"http": 80, "https": 443}
# Classes are written out, because with re.IGNORECASE some letters beyond ASCII would match as well.
_HOST = r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,40}\]"  # in brackets nothing without a colon
_PORT = r"[1-9][0-9]{0,4}"
_CHARACTER = r"[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"
_URL = re.compile(
    rf"([Hh][Tt][Tt][Pp][Ss]?)://({_HOST})(?::({_PORT}))?((?:/(?:{_CHARACTER})*)*(?:\?(?:{_CHARACTER}|[/?])*)?)"
)
_ENTRY = re.compile(rf"(\*\.)?({_HOST})(?::({_PORT}))?")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True)
class FetchTarget:
    """The request of a fetch: ``path`` includes the query; ``private``: the host's address need not be public."""

    scheme: str
    host: str
    port: int
    path: str
    private: bool = False

    @property
    def authority(self) -> str:
        """The value of the Host header, with the port unless it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True)
class AllowedHost:
    """One entry of ``LAYERTAP_ALLOW_URLS``: a name or an address, or with ``subdomains`` all names under one.

    Without a port, the default one of the URL's scheme.
    """

    name: str
    port: int | None
    subdomains: bool
    private: bool = False

    def matches(self, scheme: str, host: str, port: int) -> bool:
        """Whether the entry covers that host and port."""
        if port != (self.port or PORTS[scheme]):
            return False
        return _is_name(host) and host.endswith(f".{self.name}") if self.subdomains else host == self.name


class AllowedHosts:
    """The hosts that pictures are fetched from; SettingsError if an entry is not a host, or is only in ``private``."""

    def __init__(self, allowed: Sequence[str], private: Sequence[str]) -> None:
        hosts, privates = [_parse_entry(text) for text in allowed], [_parse_entry(text) for text in private]
        for host, text in zip(privates, private, strict=True):
            if host.subdomains or host not in hosts:
                detail = f"LAYERTAP_ALLOW_PRIVATE_URLS: {escape(text)} is not a single host of LAYERTAP_ALLOW_URLS"
                raise SettingsError(detail, hint="write it in both, in the same way")
        # Private ones first, because two entries may cover a name.
        others = [host for host in hosts if host not in privates]
        self._hosts = (*(replace(host, private=True) for host in privates), *others)

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def parse_url(self, url: str) -> FetchTarget:
        """Parse a URL; InputError if its syntax is wrong, or its host is not allowed."""
        if not self:
            raise InputError("URL inputs are off on this server", hint="send the picture itself as 'image'")
        match = _URL.fullmatch(url)
        if match is None:
            hint = "write https://HOST/PATH, percent-encoded, without user name, fragment and backslash"
            raise InputError("the URL is not one that is taken", hint=hint)
        scheme, host = match[1].lower(), match[2].lower().strip("[]")
        port = int(match[3] or PORTS[scheme])
        path = match[4] if match[4].startswith("/") else f"/{match[4]}"
        for host_entry in self._hosts:
            if host_entry.matches(scheme, host, port):
                return FetchTarget(scheme, host, port, path, host_entry.private)
        raise InputError("this server fetches nothing from that host", hint="send the picture itself as 'image'")


def _parse_entry(text: str) -> AllowedHost:
    match = _ENTRY.fullmatch(text)
    if match is not None:
        subdomains, name, port = bool(match[1]), match[2].lower().strip("[]"), int(match[3] or 0)
        valid = _is_name(name) and "." in name if subdomains else _is_name(name) or _is_address(name)
        if valid and port < 2**16:
            return AllowedHost(name, port or None, subdomains)
    hint = "write example.org, *.example.org or example.org:8080"
    raise SettingsError(f"LAYERTAP_ALLOW_URLS: {escape(text)} is not a host", hint=hint)


def _is_name(text: str) -> bool:
    """Whether it is a host name, and not a number for a resolver (127.1, 0x7f000001)."""
    labels = text.split(".")
    return all(_LABEL.fullmatch(label) for label in labels) and not _NUMBER.fullmatch(labels[-1])


def _is_address(text: str) -> bool:
    try:
        address = IPv6Address(text) if ":" in text else IPv4Address(text)
    except ValueError:
        return False
    return address.compressed == text
