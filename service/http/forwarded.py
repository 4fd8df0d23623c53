"""Who asks behind proxies: the client's address, scheme and prefix, from headers of named proxies only.

``X-Forwarded-For``, ``-Proto`` and ``-Prefix`` as proxies have them, or ``Forwarded`` (RFC 7239). One of the two is
read, never both: a proxy that writes one of them passes the other on as a stranger wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import Scope

from layertap.service.settings import UNIX, ForwardedHeaders, Network, Settings, parse_network, parse_prefix

MAX_HOPS = 32  # proxies in a row; what is before them is not looked at
SCHEMES = frozenset({"http", "https"})
NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"  # a token of RFC 9110, section 5.6.2
# A pair and what ends it. It never goes back over what it has read: a hostile header takes no longer than another.
PAIR = re.compile(rf'[ \t]*+(?:({NAME})=({NAME}|"(?:[^"\\]|\\.)*+"))?+[ \t]*+([;,]|\Z)')
Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Hop:
    """What a proxy says of whoever asked it: the address, None where it doesn't tell, and the scheme, "" likewise."""

    client: Address | None
    scheme: str = ""


class TrustedProxies:
    """The proxies that are believed what they say of clients."""

    def __init__(self, settings: Settings) -> None:
        self._networks: list[Network] = [parse_network(each) for each in settings.trusted_proxies if each != UNIX]
        self._trusts_unix = UNIX in settings.trusted_proxies
        self._read_hops = READERS[settings.forwarded_headers]
        self._reads_prefix = settings.forwarded_headers == "x-forwarded"

    def resolve(self, scope: Scope) -> Scope:
        """A request as its client sent it to the first of these proxies; as it is where none of them sent it.

        ``client`` and ``scheme`` are the client's then; ``forwarded_prefix`` is what a proxy has taken off the path.
        """
        if not (self._networks or self._trusts_unix) or not self._trusts_peer(scope):
            return scope
        headers = Headers(scope=scope)
        resolved = dict(scope)
        for hop in reversed(self._read_hops(headers)[-MAX_HOPS:]):
            resolved["scheme"] = hop.scheme or resolved["scheme"]
            if hop.client is None:
                break
            resolved["client"] = (str(hop.client), 0)
            if not self._trusts(hop.client):
                break
        if self._reads_prefix:
            resolved["forwarded_prefix"] = _read_prefix(headers)
        return resolved

    def _trusts_peer(self, scope: Scope) -> bool:
        peer = _parse_address((scope.get("client") or ("",))[0])
        return self._trusts_unix if peer is None else self._trusts(peer)

    def _trusts(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def _read_x_forwarded(headers: Headers) -> Sequence[Hop]:
    """Addresses of ``X-Forwarded-For``, each with its scheme; where there is one scheme alone it is the client's."""
    addresses = _split(headers, "x-forwarded-for")
    schemes = [each.lower() if each.lower() in SCHEMES else "" for each in _split(headers, "x-forwarded-proto")]
    if not addresses:
        return [Hop(None, schemes[-1])] if schemes else []
    if len(schemes) == 1:
        schemes *= len(addresses)
    if len(schemes) != len(addresses):
        schemes = [""] * len(addresses)
    return [Hop(_parse_node(address), scheme) for address, scheme in zip(addresses, schemes, strict=True)]


def _read_forwarded(headers: Headers) -> Sequence[Hop]:
    """Elements of ``Forwarded``; none where they are not of its grammar."""
    text = ",".join(headers.getlist("forwarded"))
    hops: list[Hop] = []
    pairs: dict[str, str] = {}
    place = 0
    while (match := PAIR.match(text, place)) is not None:
        name, value, end = match.groups()
        if name:
            pairs[name.lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value[0] == '"' else value
        if end != ";" and pairs:
            scheme = pairs.get("proto", "").lower()
            hops.append(Hop(_parse_node(pairs.get("for", "")), scheme if scheme in SCHEMES else ""))
            pairs = {}
        if not end:
            return hops
        place = match.end()
    return []


READERS: Mapping[ForwardedHeaders, Callable[[Headers], Sequence[Hop]]] = MappingProxyType(
    {"x-forwarded": _read_x_forwarded, "forwarded": _read_forwarded}
)


def _read_prefix(headers: Headers) -> str:
    """The prefix that a proxy has taken off, of the outermost one where several say so; "" where it is no plain one."""
    try:
        return parse_prefix(next(iter(_split(headers, "x-forwarded-prefix")), "").rstrip("/"))
    except ValueError:
        return ""


def _split(headers: Headers, name: str) -> list[str]:
    return [text for text in map(str.strip, ",".join(headers.getlist(name)).split(",")) if text]


def _parse_node(text: str) -> Address | None:
    """An address with or without brackets and port; None for names that hide one (RFC 7239, section 6)."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return _parse_address(text)


def _parse_address(text: str) -> Address | None:
    """An address without a zone; None where it is none. One of IPv4 that is written as one of IPv6 is one of IPv4."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
